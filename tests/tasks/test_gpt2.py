"""The task `gpt2`: the size and the rules of the network, and the text that it reads."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ridgeline.errors import DataError, TaskError
from ridgeline.tasks import gpt2, load_task
from ridgeline.tasks.gpt2 import (
    GPT2,
    INITIAL_DEVIATION,
    PADDED_VOCABULARY_SIZE,
    VOCABULARY_SIZE,
    GPT2Config,
    adamw,
    learning_rate_factor,
    next_token_accuracy,
    next_token_loss,
    warm_up_and_cosine,
)
from ridgeline.tasks.text import MOST_BUNDLED_BYTES, TextData, load_text
from ridgeline.tracing.capture import trace

TINY = GPT2Config(vocabulary_size=256, context_length=16, num_blocks=2, num_heads=2, width=32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These networks are too small to share out, and threads that wait for a busy core cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def num_parameters(config: GPT2Config) -> int:
    """By hand: embeddings, then in each block four weights with biases and two norms, and a last norm."""
    width = config.width
    attention = width * 3 * width + 3 * width + width * width + width
    perceptron = width * 4 * width + 4 * width + 4 * width * width + width
    block = attention + perceptron + 2 * 2 * width
    embeddings = (config.vocabulary_size + config.context_length) * width
    return embeddings + config.num_blocks * block + 2 * width


def test_number_of_parameters() -> None:
    """The network has the 124 439 808 parameters of GPT-2, and 47 rows more with the padded vocabulary."""
    with torch.device("meta"):
        published = GPT2(GPT2Config(vocabulary_size=VOCABULARY_SIZE))
        padded = GPT2()
    counts = [sum(p.numel() for p in model.parameters()) for model in (published, padded)]
    assert counts == [num_parameters(published.config), num_parameters(padded.config)]
    assert counts == [124_439_808, 124_439_808 + 47 * 768]
    assert PADDED_VOCABULARY_SIZE % 128 == 0


def test_blocks_are_alike() -> None:
    """Blocks are modules of one class and one shape in a list, so that one compilation serves all."""
    model = GPT2(TINY)
    assert isinstance(model.blocks, nn.ModuleList)
    shapes = {
        tuple((name, p.shape) for name, p in block.named_parameters()) for block in model.blocks
    }
    assert (len(model.blocks), len(shapes)) == (2, 1)


def test_later_tokens_do_not_matter() -> None:
    """The logits of a token depend on it and those before it only."""
    model = GPT2(TINY)
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_positions_matter() -> None:
    """The same token has other logits at another place, and short sequences take the first places."""
    model = GPT2(TINY)
    logits = model(torch.zeros(1, 16, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 1])
    torch.testing.assert_close(model(torch.zeros(1, 3, dtype=torch.int64)), logits[:, :3])


def test_attention_against_its_definition() -> None:
    """Attention is softmax of scaled scores over the past, head by head."""
    attention = GPT2(TINY).blocks[0].attention
    x = torch.randn(2, 16, 32)
    query, key, value = (
        part.unflatten(-1, (2, 16)).transpose(1, 2)
        for part in attention.query_key_value(x).split(32, dim=-1)
    )
    scores = query @ key.mT / math.sqrt(16)
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.projection(mixed))


def test_head_is_tied() -> None:
    """The output layer is the embedding: there is no other weight of its shape, and it scales the logits."""
    model = GPT2(TINY)
    assert [p for p in model.parameters() if p.shape == (256, 32)] == [model.embedding.weight]
    tokens = torch.randint(0, 256, (1, 4))
    hidden = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    torch.testing.assert_close(model(tokens), hidden[0] @ model.embedding.weight.T)


def test_initialisation() -> None:
    """Weights begin at a deviation of 0.02, those added to the residual stream at 0.02/sqrt(2 N)."""
    config = GPT2Config(
        vocabulary_size=256, context_length=64, num_blocks=8, num_heads=2, width=256
    )
    model = GPT2(config)
    block = model.blocks[3]
    plain = (block.attention.query_key_value, block.perceptron.expansion, model.embedding)
    scaled = (block.attention.projection, block.perceptron.projection)
    for module, deviation in (
        *((module, INITIAL_DEVIATION) for module in plain),
        *((module, INITIAL_DEVIATION / 4) for module in scaled),
    ):
        assert float(module.weight.detach().std()) == pytest.approx(deviation, rel=0.02)
    assert float(model.positions.detach().std()) == pytest.approx(INITIAL_DEVIATION, rel=0.02)
    tokens = torch.randint(0, 256, (8, 65))
    loss = next_token_loss(model, (tokens[:, :-1], tokens[:, 1:])).detach()
    assert float(loss) == pytest.approx(math.log(256), rel=0.02)


def test_dropout() -> None:
    """Dropout acts in training only, and is absent by default."""
    tokens = torch.randint(0, 256, (2, 16))
    dropping = GPT2(
        GPT2Config(
            vocabulary_size=256, context_length=16, num_blocks=1, num_heads=2, width=32, dropout=0.5
        )
    )
    assert not torch.equal(dropping(tokens), dropping(tokens))
    dropping.eval()
    assert torch.equal(dropping(tokens), dropping(tokens))
    plain = GPT2(TINY)
    assert torch.equal(plain(tokens), plain(tokens))


def test_decay_is_for_matrices() -> None:
    """Every parameter is optimised once; only those with two dimensions and more decay."""
    model = GPT2(TINY)
    groups = adamw(model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert {p.dim() for p in groups[1]["params"]} == {1}
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_learning_rate() -> None:
    """It rises to its peak over a twentieth of the run, falls to a tenth, and serves runs of any length."""
    factors = [learning_rate_factor(step, 200) for step in range(200)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)
    for num_steps in (1, 2, 3):
        optimizer = adamw(GPT2(TINY))
        scheduler = warm_up_and_cosine(optimizer, num_steps)
        for _ in range(num_steps + 1):
            assert 0 < optimizer.param_groups[0]["lr"] <= 6e-4
            optimizer.step()
            scheduler.step()


def test_metric_is_a_sum_over_sequences() -> None:
    """The metric is the fraction of right next tokens of each sequence, summed over the batch."""

    class Successor(nn.Module):
        """Holds the next number likeliest."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(tokens + 1, 16)

    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 9]])
    following = torch.tensor([[2, 3, 4, 5], [2, 5, 9, 9]])
    assert float(next_token_accuracy(Successor(), (tokens, following))) == 1.25


def test_it_learns_a_batch() -> None:
    """Twenty steps on one batch of the bundled text more than halve its loss."""
    task = gpt2(config=TINY, batch_size=4)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = task.train_data.batch(torch.arange(4))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = task.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_traced_flops() -> None:
    """A trace finds the FLOP of GPT-2: six per weight and token, and attention over the past."""
    task = gpt2(config=TINY, batch_size=4)
    model = task.model()
    batch = task.train_data.batch(torch.arange(4))
    workload = trace(model, task.loss_fn, task.optimizer(model), batch, name="gpt2")
    tokens, width = 4 * 16, 32
    weights = 256 * width + 2 * 12 * width * width
    pairs = 4 * 16 * 17 // 2  # for each head, as many features as heads divide the width into
    assert workload.flops == 6 * tokens * weights + 2 * (2 * 2 + 2 * 5) * pairs * width


def test_built_in() -> None:
    """The built-in task is the model of 124 million parameters on 8 sequences of 1024 tokens."""
    task = load_task("gpt2")
    tokens, following = task.train_data[3]
    assert (task.name, task.batch_size, task.clip_norm) == ("gpt2", 8, 1.0)
    assert tokens.shape == following.shape == (1024,)
    assert (int(tokens.min()) >= 0, int(tokens.max()) < 256) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"config": TINY, "sequence_length": 17},
            (
                "wanted sequence_length from 1 to context_length=16, got 17 for gpt2; shorten the sequences "
                "or enlarge the context"
            ),
        ),
        (
            {"config": GPT2Config(vocabulary_size=64)},
            "wanted vocabulary_size >= 256, one token a byte, got 64 for gpt2; raise it",
        ),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict[str, object], message: str) -> None:
    """Sequences longer than the context and too few tokens are refused, with the number."""
    with pytest.raises(TaskError) as caught:
        gpt2(**arguments)
    assert str(caught.value) == message


def test_heads_share_the_width() -> None:
    """A width that is no multiple of the heads is refused."""
    with pytest.raises(TaskError) as caught:
        GPT2Config(width=100)
    assert str(caught.value) == (
        "wanted a width that 12 heads can share, got width=100 in GPT2Config; make it a multiple of num_heads"
    )


def test_windows() -> None:
    """Windows follow each other; the next token of each is the token one later; the rest is left out."""
    data = TextData(torch.arange(11, dtype=torch.uint8), sequence_length=3)
    assert len(data) == 3
    tokens, following = data.batch(torch.tensor([2, 0]))
    assert tokens.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert following.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert tokens.dtype == following.dtype == torch.int64
    assert torch.equal(data[2][0], tokens[0])
    assert len(TextData(torch.zeros(9, dtype=torch.uint8), sequence_length=3)) == 2
    assert len(TextData(torch.zeros(0, dtype=torch.uint8), sequence_length=3)) == 0


def test_bundled_text() -> None:
    """Without a directory the text is Python's own sources: the same each time, a few megabytes."""
    first, second = load_text(sequence_length=64), load_text(sequence_length=64)
    assert torch.equal(first.train.text, second.train.text)
    size = len(first.train.text) + len(first.test.text)
    assert 500_000 < size <= MOST_BUNDLED_BYTES
    assert b"import" in bytes(first.test.text.tolist())


def test_text_of_a_directory(tmp_path: Path) -> None:
    """Text files are taken by name; every tenth from the first is for the test; other files are not read."""
    for index in range(12):
        (tmp_path / f"{index:02}.txt").write_text(chr(ord("a") + index) * 4)
    (tmp_path / "notes.md").write_text("zzzz")
    text = load_text(tmp_path, sequence_length=2)
    assert bytes(text.test.text.tolist()) == b"aaaakkkk"
    assert bytes(text.train.text.tolist()) == b"bbbbccccddddeeeeffffgggghhhhiiiijjjjllll"


def test_text_of_one_file(tmp_path: Path) -> None:
    """The last tenth of a single file is for the test; a token is a byte of UTF-8."""
    (tmp_path / "one.txt").write_text("é" * 50, encoding="utf-8")
    text = load_text(tmp_path, sequence_length=4)
    assert text.train.text.tolist() == [0xC3, 0xA9] * 45
    assert text.test.text.tolist() == [0xC3, 0xA9] * 5


def refused(directory: Path, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_task("gpt2", data_dir=directory)
    assert str(caught.value) == message


def test_missing_text(tmp_path: Path) -> None:
    """A directory that is not there, or holds no text, says so."""
    nowhere = tmp_path / "nowhere"
    refused(
        nowhere,
        f"wanted a directory with .txt files, got no directory at {nowhere}; give the path of one",
    )
    (tmp_path / "a.md").write_text("text")
    refused(
        tmp_path,
        f"wanted .txt files, got none in {tmp_path}; put UTF-8 text there, in files ending in .txt",
    )


def test_unusable_text(tmp_path: Path) -> None:
    """An empty file, one that is not UTF-8, and too little text say which and what to do."""
    path = tmp_path / "a.txt"
    path.write_text("")
    refused(tmp_path, f"wanted text, got an empty file at {path}; remove it or fill it")
    path.write_bytes(b"caf\xe9")
    refused(
        tmp_path,
        f"wanted UTF-8 text, got byte 0xe9 at position 3 of {path}; convert the file, for example with iconv",
    )
    path.write_bytes(b"x" * 2000)
    refused(
        tmp_path,
        f"wanted at least 1025 bytes of test text from {tmp_path}, got 200; add text, or take a shorter "
        "sequence_length",
    )


def test_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without the sources of its library needs text files."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError) as caught:
        load_text(sequence_length=4)
    assert str(caught.value) == (
        "wanted the sources of Python's standard library as text, got 0 files in "
        f"{tmp_path}; give .txt files with `--data DIR`"
    )
