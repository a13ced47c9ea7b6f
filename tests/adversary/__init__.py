"""An adversary of our own: programs made from a grammar, run in every mode and compared with plain PyTorch.

A *program* is data (`program`): features of a model and of its loss, and calls with what changes before them.
The *grammar* is the table of features, changes, inputs and contexts, each a few lines of Python text.
`rendering` writes a program as a Python file, `judging` runs it in a mode beside plain PyTorch and compares
`portraits` of all that a call may change, `shrinking` makes a failing program small, `scripts` writes it as a
script of its own. `run.py` does this for thousands, in child processes.

To extend it, add a `Feature` or an entry of a table in `grammar/`; nothing else changes.
"""
