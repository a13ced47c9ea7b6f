"""All tables of the grammar by name."""

from adversary.grammar.attributes import ATTRIBUTES, OBJECTS
from adversary.grammar.branches import BRANCHES
from adversary.grammar.code import CLASSES, FUNCTIONS
from adversary.grammar.containers import CONTAINERS
from adversary.grammar.effects import EFFECTS
from adversary.grammar.everyday import EVERYDAY
from adversary.grammar.feature import Feature
from adversary.grammar.general import (
    CHANGES,
    CONTEXTS,
    INPUTS,
    OPTIMIZERS,
    STEP_CHANGES,
    WITHOUT_GRADIENTS,
)
from adversary.grammar.hooks import HOOKS
from adversary.grammar.library import LIBRARY
from adversary.grammar.lookups import LOOKUPS
from adversary.grammar.losses import LOSSES
from adversary.grammar.members import MEMBERS
from adversary.grammar.parametrized import PARAMETRIZED
from adversary.grammar.randomness import RANDOMNESS
from adversary.grammar.regions import REGIONS
from adversary.grammar.slopes import LOOKING, SLOPES
from adversary.grammar.tensors import BUFFERS, RESULTS, SHARED

__all__ = [
    "CHANGES",
    "CONTEXTS",
    "FEATURES",
    "INPUTS",
    "OPTIMIZERS",
    "STEP_CHANGES",
    "WITHOUT_GRADIENTS",
]

_TABLES = (
    *(ATTRIBUTES, OBJECTS, LOOKUPS, CLASSES, FUNCTIONS, BUFFERS, SHARED, RESULTS, PARAMETRIZED),
    *(HOOKS, RANDOMNESS, BRANCHES, EFFECTS, LOSSES, MEMBERS, LIBRARY, REGIONS, CONTAINERS),
    *(EVERYDAY, SLOPES, LOOKING),
)
FEATURES: dict[str, Feature] = {feature.name: feature for table in _TABLES for feature in table}
