"""Transformers for text, written with torch's own layers: encoder, decoder and encoder-decoder."""

import torch
from torch import Tensor, nn

from ridgeline.experiments.draws import next_tokens
from ridgeline.experiments.networks.network import Parts, Scale, adamw, network, token_loss
from ridgeline.tasks.gpt2 import GPT2, GPT2Config, next_token_loss

ENCODER, DECODER, BOTH = "encoder", "decoder", "encoder-decoder"
MASKED = 0.15
"""Fraction of the tokens that an encoder predicts. Source: Devlin et al., BERT (2019), section 3.1."""
NOT_COUNTED = -100
"""The label of tokens that are not predicted, as torch's cross entropy has it."""


class MaskedEncoder(nn.Module):
    """Torch's own encoder over tokens, some of which it predicts; padding is masked by lengths."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        """Logits [N, T, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        return self.output(self.encoder(x, src_key_padding_mask=is_padding))


@network(
    ENCODER,
    "torch's encoder of 6 layers with padding and dropout, 32 x 256 tokens",
    adamw,
    several_workers=True,
)
def _masked_encoder(scale: Scale) -> Parts:
    count, length, vocabulary = (32, 256, 16000) if scale == "gpu" else (4, 32, 200)
    width, blocks, heads = (512, 6, 8) if scale == "gpu" else (64, 2, 4)

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        # From 1 on: 0 stands for tokens that are to be predicted.
        tokens = torch.randint(1, vocabulary, (count, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        # Half of the places at most, so that every sequence has tokens to predict.
        is_padding = torch.arange(length)[None] >= lengths
        is_predicted = (torch.rand(count, length, generator=generator) < MASKED) & ~is_padding
        labels = tokens.masked_fill(~is_predicted, NOT_COUNTED)
        return tokens.masked_fill(is_predicted, 0), is_padding, labels

    return Parts(lambda: MaskedEncoder(vocabulary, width, blocks, heads, length), draw, token_loss)


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask for the target: the encoder-decoder of Vaswani et al. (2017)."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            width, heads, blocks, blocks, 4 * width, dropout=0.1, batch_first=True
        )
        self.output = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [N, T, vocabulary] of the target's next tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        features = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.output(features)


@network(BOTH, "nn.Transformer of 6 + 6 layers, causal mask, dropout, 64 x 128 tokens", adamw)
def _translator(scale: Scale) -> Parts:
    count, length, vocabulary = (64, 128, 16000) if scale == "gpu" else (4, 16, 200)
    width, blocks, heads = (512, 6, 8) if scale == "gpu" else (64, 1, 4)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        source = torch.randint(0, vocabulary, (count, length), generator=generator)
        return source, torch.randint(0, vocabulary, (count, length + 1), generator=generator)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        logits = model(source, target[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    return Parts(lambda: Translator(vocabulary, width, blocks, heads), draw, loss_fn)


@network(
    DECODER,
    "GPT-2 of our tasks with dropout, clipping, 8 x 1024 tokens",
    adamw,
    clip_norm=1.0,
    several_workers=True,
)
def _gpt2_dropout(scale: Scale) -> Parts:
    count = 8 if scale == "gpu" else 2
    config = GPT2Config(dropout=0.1)
    if scale == "cpu":
        config = GPT2Config(
            vocabulary_size=256, context_length=32, num_blocks=2, num_heads=4, width=64, dropout=0.1
        )

    draw = next_tokens(count, config.context_length, min(config.vocabulary_size, 50257))
    return Parts(lambda: GPT2(config), draw, next_token_loss)


NETWORKS = (_masked_encoder, _gpt2_dropout, _translator)
