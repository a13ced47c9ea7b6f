"""`gpt2`: the decoder-only transformer GPT-2, and the task that trains it on bytes of text.

Twelve equal blocks: layer normalisation before attention and before the perceptron (pre-norm), learned
positions, GELU in its tanh form, and an output layer that shares its weight with the token embedding.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ridgeline.errors import TaskError
from ridgeline.runtime.training.task import Task
from ridgeline.tasks.text import NUM_BYTES, load_text

VOCABULARY_SIZE = 50257
"""Tokens of GPT-2. Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019)."""
PADDED_VOCABULARY_SIZE = 50304
"""The next multiple of 128: matrix units work on whole tiles, and with 50257, which is odd, rows of
half-precision logits would not even begin at multiples of 4 bytes. The other 47 tokens never occur."""

INITIAL_DEVIATION = 0.02
"""Of all weights and embeddings. Source: Radford et al., Improving Language Understanding (2018)."""
PEAK_LEARNING_RATE = 6e-4
FINAL_FRACTION = 0.1
"""The learning rate ends at this fraction of its peak."""
WARM_UP_FRACTION = 0.05
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
"""Rate, betas, decay and clipping. Source: Brown et al., Language Models are Few-Shot Learners (2020)."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of the network; the defaults are the model of 124 million parameters.

    Attributes:
        vocabulary_size: Rows of the token embedding.
        context_length: Most tokens in a sequence.
        num_blocks: Transformer blocks.
        num_heads: Attention heads of a block.
        width: Features of a token; a multiple of `num_heads`.
        dropout: Probability that a feature is dropped: embedded, in attention, before a residual addition.
    """

    vocabulary_size: int = PADDED_VOCABULARY_SIZE
    context_length: int = 1024
    num_blocks: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a width that the heads cannot share."""
        if self.width % self.num_heads:
            raise TaskError(
                f"wanted a width that {self.num_heads} heads can share, got width={self.width} in "
                "GPT2Config; make it a multiple of num_heads"
            )


class Attention(nn.Module):
    """Causal self-attention of several heads: [N, T, width] to the same."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        # One product for all three, as larger kernels fill more of a device.
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Every token looks at itself and at those before it."""
        batch, length, width = x.shape
        shape = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(
            query.view(shape).transpose(1, 2),
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Perceptron(nn.Module):
    """Two linear layers, four times as wide between them: [N, T, width] to the same."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.width, 4 * config.width)
        self.projection = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself."""
        return self.projection(F.gelu(self.expansion(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then perceptron, each normalised before and added to what came in."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.perceptron = Perceptron(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of sequences, [N, T, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.perceptron(self.norm2(x)))


class GPT2(nn.Module):
    """The network: tokens int64 [N, T] to logits of the next token [N, T, vocabulary_size]."""

    def __init__(self, config: GPT2Config | None = None) -> None:
        super().__init__()
        self.config = config = config or GPT2Config()
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Parameter(torch.empty(config.context_length, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of sequences of at most `context_length` tokens."""
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        # The embedding's own weight: torch lists and updates it once.
        return F.linear(self.norm(x), self.embedding.weight)

    def _initialise(self) -> None:
        """Normal weights, no biases; what is added to the residual stream is scaled by its additions.

        Source: Radford et al. (2019), section 2.3: 1/sqrt(N) for N residual layers, two in a block.
        """
        scaled = INITIAL_DEVIATION / math.sqrt(2 * self.config.num_blocks)
        nn.init.normal_(self.positions, std=INITIAL_DEVIATION)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                is_residual = name.endswith(".projection")
                nn.init.normal_(module.weight, std=scaled if is_residual else INITIAL_DEVIATION)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)


def gpt2(
    *,
    data_dir: str | Path | None = None,
    batch_size: int = 8,
    sequence_length: int | None = None,
    config: GPT2Config | None = None,
) -> Task:
    """The task `gpt2`: AdamW, linear warm-up, cosine decay, gradients clipped to a norm of 1.

    Args:
        data_dir: Directory with UTF-8 .txt files; None: the sources of Python's standard library.
        batch_size: Sequences per step over all workers together; the learning rate does not follow.
        sequence_length: Tokens (bytes) of a sequence; None: the model's context length.
        config: Sizes of the network; None: 124 million parameters, 1024 tokens. A small one serves CPUs.

    Raises:
        TaskError: the sequences do not fit the context, or the vocabulary is smaller than 256.
        DataError: the data is missing, too short or not text.
    """
    sizes = config or GPT2Config()
    length = sizes.context_length if sequence_length is None else sequence_length
    if not 1 <= length <= sizes.context_length:
        raise TaskError(
            f"wanted sequence_length from 1 to context_length={sizes.context_length}, got {length} for gpt2; "
            "shorten the sequences or enlarge the context"
        )
    if sizes.vocabulary_size < NUM_BYTES:
        raise TaskError(
            f"wanted vocabulary_size >= {NUM_BYTES}, one token a byte, got {sizes.vocabulary_size} for gpt2; "
            "raise it"
        )
    data = load_text(data_dir, sequence_length=length)
    return Task(
        name="gpt2",
        model=lambda: GPT2(sizes),
        loss_fn=next_token_loss,
        optimizer=adamw,
        train_data=data.train,
        test_data=data.test,
        metric=next_token_accuracy,
        batch_size=batch_size,
        clip_norm=CLIP_NORM,
        scheduler=warm_up_and_cosine,
    )


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over all tokens of a batch of (tokens, next tokens), int64 [N, T] each."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def next_token_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Fraction of next tokens that the model holds likeliest, summed over the sequences of a batch."""
    tokens, following = batch
    return (model(tokens).argmax(dim=-1) == following).to(torch.float32).mean(dim=1).sum()


def adamw(model: nn.Module) -> Optimizer:
    """AdamW that decays matrices only: biases and normalisation gains have no size to be kept small."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=PEAK_LEARNING_RATE,
        betas=BETAS,
    )


def warm_up_and_cosine(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Linear warm-up over the first twentieth of the steps, then half a cosine down to a tenth."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, num_steps))


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Fraction of the peak learning rate at a step, counted from 0."""
    warm_up = max(1, round(WARM_UP_FRACTION * num_steps))
    if step < warm_up:
        # Not from 0, with which the first step would change nothing.
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, num_steps - warm_up))
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))
