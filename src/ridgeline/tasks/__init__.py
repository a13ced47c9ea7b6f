"""Built-in training tasks and their data, and the loading of a user's own."""

from ridgeline.runtime.training.task import Task as Task
from ridgeline.tasks.gpt2 import gpt2 as gpt2
from ridgeline.tasks.load import load_task as load_task
from ridgeline.tasks.mlp import mlp as mlp
from ridgeline.tasks.resnet18 import resnet18 as resnet18

__all__ = ("Task", "gpt2", "load_task", "mlp", "resnet18")
