"""Networks that make pictures: diffusion, an adversarial pair, autoencoders with and without randomness."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from ridgeline.experiments.networks.network import Parts, Scale, adam, adamw, network

DIFFUSION, GAN, AUTOENCODER = "diffusion", "GAN", "autoencoder"
NOISE_STEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02
"""Steps and variances of the noise. Source: Ho et al., Denoising Diffusion (2020), section 4."""


class TimedBlock(nn.Module):
    """A residual block with the time as an input: [N, C, H, W] and [N, T] to [N, C', H, W]."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.dropout = nn.Dropout(0.1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The block's output."""
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        y = self.conv2(self.dropout(nn.functional.silu(self.norm2(y))))
        return y + self.shortcut(x)


class PixelAttention(nn.Module):
    """Self-attention of pixels, added to what came in."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.query_key_value = nn.Conv2d(channels, 3 * channels, 1)
        self.projection = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to the same."""
        joined = self.query_key_value(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1))
        query, key, value = joined.transpose(3, 4).unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.projection(mixed.transpose(2, 3).reshape(x.shape))


class DiffusionUNet(nn.Module):
    """Predicts the noise in pictures at given times.

    Source: Ho et al. (2020), appendix B: residual blocks, attention at the lower resolution.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = TimedBlock(width, width, time)
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.down2 = TimedBlock(2 * width, 2 * width, time)
        self.attention1 = PixelAttention(2 * width, heads)
        self.shrink2 = nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle1 = TimedBlock(2 * width, 2 * width, time)
        self.attention2 = PixelAttention(2 * width, heads)
        self.middle2 = TimedBlock(2 * width, 2 * width, time)
        self.up2 = TimedBlock(4 * width, 2 * width, time)
        self.up1 = TimedBlock(3 * width, width, time)
        self.output = nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:
        """Noisy pictures [N, 3, H, W] at moments [N] to their noise."""
        half = self.width // 2
        places = torch.arange(half, device=x.device, dtype=torch.float32)
        angle = moment[:, None].float() * torch.exp(-math.log(10_000.0) / half * places)
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        first = self.down1(self.stem(x), time)
        second = self.attention1(self.down2(self.shrink(first), time))
        y = self.middle2(self.attention2(self.middle1(self.shrink2(second), time)), time)
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        y = self.up2(torch.cat([y, second], 1), time)
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.output(self.up1(torch.cat([y, first], 1), time))


def denoising_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Squared error of the noise; moments and noise are drawn here, as everybody does."""
    (pictures,) = batch
    moment = torch.randint(0, NOISE_STEPS, pictures.shape[:1], device=pictures.device)
    noise = torch.randn_like(pictures)
    beta = torch.linspace(FIRST_BETA, LAST_BETA, NOISE_STEPS, device=pictures.device)
    kept = torch.cumprod(1.0 - beta, 0)[moment][:, None, None, None]
    noisy = kept.sqrt() * pictures + (1.0 - kept).sqrt() * noise
    return nn.functional.mse_loss(model(noisy, moment).float(), noise)


class AdversarialPair(nn.Module):
    """A generator that is trained and a discriminator that is not, as in the generator's turn.

    Source: Radford et al., DCGAN (2016).
    """

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        # From one place to 4 x 4; each of the layers behind doubles that, up to 64 x 64.
        up: list[nn.Module] = [nn.ConvTranspose2d(latent, 8 * width, 4), nn.BatchNorm2d(8 * width)]
        for factor in (8, 4, 2):
            halved = factor * width // 2
            convolution = nn.ConvTranspose2d(factor * width, halved, 4, 2, 1, bias=False)
            up += [nn.ReLU(), convolution, nn.BatchNorm2d(halved)]
        up += [nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()]
        self.generator = nn.Sequential(*up)
        down: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for factor in (1, 2, 4):
            convolution = nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1)
            down += [convolution, nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(8 * width, 1, 4))
        # Gradients pass through it to the generator, and none are kept for it.
        self.discriminator.requires_grad_(requires_grad=False)

    def forward(self, latent: Tensor) -> Tensor:
        """Latent vectors [N, L, 1, 1] to what the discriminator thinks of the pictures, [N]."""
        return self.discriminator(self.generator(latent)).flatten()


def deceiving_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """How far the discriminator is from taking the pictures for real ones."""
    return nn.functional.softplus(-model(batch[0])).mean()


class VAE(nn.Module):
    """A variational autoencoder that speaks `torch.distributions`.

    Source: Kingma and Welling, Auto-Encoding Variational Bayes (2014).
    """

    def __init__(self, inputs: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.mean, self.log_scale = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, inputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Normal]:
        """Logits of the reconstruction, and the distribution of the latent vectors."""
        features = self.encoder(x)
        # In float32: the exponential of a scale overflows in 16 bits.
        posterior = Normal(self.mean(features).float(), self.log_scale(features).float().exp())
        return self.decoder(posterior.rsample()), posterior


def evidence_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The negative evidence lower bound, a mean over samples."""
    (x,) = batch
    logits, posterior = model(x)
    prior = Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
    told = nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    return (told + kl_divergence(posterior, prior).sum(1)).mean()


def _autoencoder(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.GELU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GELU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GELU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
    )  # fmt: skip


def _repeating_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[0])


def _pictures(
    *shape: int, draw: Callable[..., Tensor] = torch.randn
) -> Callable[[torch.Generator], tuple[Tensor]]:
    return lambda generator: (draw(shape, generator=generator),)


@network(
    DIFFUSION,
    "U-Net with times and attention, noise drawn in the loss, batch 32 of 64 x 64",
    adamw,
    several_workers=True,
)
def _diffusion_unet(scale: Scale) -> Parts:
    width, heads, shape = (128, 4, (32, 3, 64, 64)) if scale == "gpu" else (16, 2, (2, 3, 16, 16))
    return Parts(lambda: DiffusionUNet(width, heads), _pictures(*shape), denoising_loss)


@network(GAN, "generator against a frozen discriminator, batch 128 of 64 x 64", adam)
def _dcgan_generator(scale: Scale) -> Parts:
    latent, width, count = (128, 64, 128) if scale == "gpu" else (16, 4, 4)
    return Parts(
        lambda: AdversarialPair(latent, width), _pictures(count, latent, 1, 1), deceiving_loss
    )


@network(AUTOENCODER, "variational, of torch.distributions, 784-1024-1024-64, batch 512", adam)
def _vae(scale: Scale) -> Parts:
    inputs, width, latent, count = (784, 1024, 64, 512) if scale == "gpu" else (64, 32, 8, 16)
    return Parts(
        lambda: VAE(inputs, width, latent), _pictures(count, inputs, draw=torch.rand), evidence_loss
    )


@network(AUTOENCODER, "convolutions down and up, batch 64 of 128 x 128", adam)
def _conv_autoencoder(scale: Scale) -> Parts:
    width, shape = (64, (64, 3, 128, 128)) if scale == "gpu" else (8, (2, 3, 32, 32))
    return Parts(lambda: _autoencoder(width), _pictures(*shape), _repeating_loss)


NETWORKS = (_diffusion_unet, _dcgan_generator, _vae, _conv_autoencoder)
