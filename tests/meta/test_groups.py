"""Every collective names the group that it is over: the default one is not always who trains together."""

import ast
import inspect
import types
from pathlib import Path

import torch.distributed as dist

import ridgeline as rl

SOURCE = Path(rl.__file__).parent
NOT_OF_ONE_GROUP = {"destroy_process_group"}
WITH_GROUP = {
    name: [*inspect.signature(function).parameters]
    for name, function in vars(dist).items()
    if type(function) is types.FunctionType  # isinstance would look into deprecated names
    and "group" in inspect.signature(function).parameters
    and name not in NOT_OF_ONE_GROUP
}
"""All that takes the default group where none is named: collectives, and questions about rank and size."""
GLOBAL_ROOTS = {"src", "dst"}


def unnamed(text: str) -> list[str]:
    """Calls that name no group, or a root by its rank in the job, which may be outside of the group."""
    tree = ast.parse(text)
    modules, functions = {"torch.distributed"}, dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            functions |= {a.asname or a.name: a.name for a in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        name = functions.get(name, "") if not module else name if module in modules else ""
        if name not in WITH_GROUP:
            continue
        given = {keyword.arg for keyword in node.keywords}
        given |= set(WITH_GROUP[name][: len(node.args)])
        if "group" not in given or given & GLOBAL_ROOTS:
            found.append(f"line {node.lineno}: {name}")
    return found


def test_calls_without_a_group_are_found() -> None:
    """However torch.distributed is imported; a root is given by its position in the group."""
    assert {"all_reduce", "broadcast", "all_gather", "barrier", "get_rank"} <= {*WITH_GROUP}
    assert unnamed(
        "import torch.distributed as d, torch\n"
        "from torch import distributed as e\n"
        "from torch.distributed import all_reduce as f, ProcessGroup\n"
        "d.all_reduce(x)\n"
        "e.barrier()\n"
        "f(x)\n"
        "torch.distributed.broadcast(x, 0)\n"
        "d.broadcast(x, src=0, group=g)\n"
        "d.broadcast(x, 0, g)\n"
        "d.broadcast(x, group=g, group_src=0)\n"
        "f(x, group=g)\n"
        "x.broadcast(y)\n"
        "d.destroy_process_group()\n"
    ) == [f"line {n}: {name}" for n, name in enumerate(
        ("all_reduce", "barrier", "all_reduce", "broadcast", "broadcast", "broadcast"), 4
    )]  # fmt: skip


def test_every_collective_names_its_group() -> None:
    found = {str(f.relative_to(SOURCE)): unnamed(f.read_text()) for f in SOURCE.rglob("*.py")}
    assert len(found) > 100
    assert {file: calls for file, calls in found.items() if calls} == {}
