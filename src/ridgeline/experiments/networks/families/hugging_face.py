"""Networks of the package `transformers`, from their configurations: text, speech and images."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.families.dense_prediction import SEGMENTATION
from ridgeline.experiments.networks.families.language import (
    BOTH,
    DECODER,
    ENCODER,
    MASKED,
    NOT_COUNTED,
)
from ridgeline.experiments.networks.families.speech import SPEECH
from ridgeline.experiments.networks.network import Parts, Scale, adamw, network

_network = partial(network, make_optimizer=adamw, needs=("transformers",))


def transformers() -> Any:
    """The package `transformers`, imported when it is needed."""
    return importlib.import_module("transformers")


def _made(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Makes the model of a name from a configuration of a name."""

    def make() -> nn.Module:
        # Imported here: seconds that a list of networks should not take.
        package = transformers()
        return getattr(package, model)(getattr(package, config)(**settings))

    return make


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of `transformers` computes itself; its output is a dataclass."""
    return model(**batch).loss


def _masked_tokens(count: int, length: int, vocabulary: int) -> Any:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(0, vocabulary, (count, length), generator=generator)
        is_predicted = torch.rand(count, length, generator=generator) < MASKED
        return {
            "input_ids": tokens.masked_fill(is_predicted, 0),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~is_predicted, NOT_COUNTED),
        }

    return draw


def _tokens_as_labels(count: int, length: int, vocabulary: int) -> Any:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(0, vocabulary, (count, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return draw


@_network(ENCODER, "BERT-base of transformers, dropout, 32 x 128 tokens", several_workers=True)
def _bert_base(scale: Scale) -> Parts:
    count, length = (32, 128) if scale == "gpu" else (4, 32)
    sizes: dict[str, int] = {} if scale == "gpu" else {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 500,
    }  # fmt: skip
    make = _made("BertForMaskedLM", "BertConfig", **sizes)
    vocabulary = sizes.get("vocab_size", 30522)
    return Parts(make, _masked_tokens(count, length, vocabulary), own_loss)


@_network(DECODER, "GPT-2 of transformers, dropout, 8 x 1024 tokens", several_workers=True)
def _gpt2_transformers(scale: Scale) -> Parts:
    count, length = (8, 1024) if scale == "gpu" else (2, 32)
    sizes: dict[str, int] = {} if scale == "gpu" else {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 500,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip

    # The cache of keys is for generation, and would be one more output of each step.
    make = _made("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes)
    return Parts(make, _tokens_as_labels(count, length, sizes.get("vocab_size", 50257)), own_loss)


@_network(BOTH, "T5-small of transformers, dropout, 16 x 256 tokens")
def _t5_small(scale: Scale) -> Parts:
    count, length = (16, 256) if scale == "gpu" else (2, 16)
    sizes: dict[str, int] = {} if scale == "gpu" else {
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 500,
    }  # fmt: skip

    own = {"use_cache": False, "decoder_start_token_id": 0}
    make = _made("T5ForConditionalGeneration", "T5Config", **own, **sizes)
    return Parts(make, _tokens_as_labels(count, length, sizes.get("vocab_size", 32128)), own_loss)


@_network(
    ENCODER, "ALBERT-base of transformers, 12 layers that share weights, dropout, 32 x 128 tokens"
)
def _albert_base(scale: Scale) -> Parts:
    count, length = (32, 128) if scale == "gpu" else (4, 32)
    sizes: dict[str, int] = {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    } if scale == "gpu" else {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 500,
        "embedding_size": 32, "num_hidden_layers": 2,
    }  # fmt: skip
    make = _made("AlbertForMaskedLM", "AlbertConfig", hidden_dropout_prob=0.1, **sizes)
    vocabulary = sizes.get("vocab_size", 30000)
    return Parts(make, _masked_tokens(count, length, vocabulary), own_loss)


@_network(DECODER, "Llama of transformers, 12 layers of 768, 4 key heads, 8 x 1024 tokens")
def _llama_small(scale: Scale) -> Parts:
    count, length = (8, 1024) if scale == "gpu" else (2, 32)
    sizes: dict[str, int] = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
    } if scale == "gpu" else {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500,
    }  # fmt: skip
    make = _made("LlamaForCausalLM", "LlamaConfig", use_cache=False, **sizes)
    return Parts(make, _tokens_as_labels(count, length, sizes["vocab_size"]), own_loss)


@_network(SPEECH, "Whisper-tiny of transformers, dropout, 16 x 3000 frames, 128 tokens")
def _whisper_tiny(scale: Scale) -> Parts:
    count, frames, length = (16, 3000, 128) if scale == "gpu" else (2, 64, 8)
    sizes: dict[str, int] = {} if scale == "gpu" else {
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "vocab_size": 500, "num_mel_bins": 16, "max_source_positions": 32, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    bands, vocabulary = sizes.get("num_mel_bins", 80), sizes.get("vocab_size", 51865)

    own = {"use_cache": False, "dropout": 0.1}
    make = _made("WhisperForConditionalGeneration", "WhisperConfig", **own, **sizes)

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "input_features": torch.randn(count, bands, frames, generator=generator),
            "labels": torch.randint(0, vocabulary, (count, length), generator=generator),
        }

    return Parts(make, draw, own_loss)


@_network(SEGMENTATION, "SegFormer-B0 of transformers, batch 16 of 256 x 256")
def _segformer_b0(scale: Scale) -> Parts:
    count, side, classes = (16, 256, 150) if scale == "gpu" else (2, 64, 5)
    sizes: dict[str, Any] = {} if scale == "gpu" else {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32,
        "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2],
    }  # fmt: skip

    sizes["num_labels"] = classes
    make = _made("SegformerForSemanticSegmentation", "SegformerConfig", **sizes)

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        size = (count, side, side)
        return {
            "pixel_values": torch.randn(count, 3, side, side, generator=generator),
            "labels": torch.randint(0, classes, size, generator=generator),
        }

    return Parts(make, draw, own_loss)


NETWORKS = (
    _bert_base,
    _gpt2_transformers,
    _t5_small,
    _albert_base,
    _llama_small,
    _whisper_tiny,
    _segformer_b0,
)
