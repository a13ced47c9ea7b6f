"""All tables of the grammar by name."""

from adversary.grammar.attributes import ATTRIBUTES
from adversary.grammar.feature import Feature
from adversary.grammar.general import CHANGES, CONTEXTS, INPUTS, OPTIMIZERS, STEP_CHANGES

__all__ = ["CHANGES", "CONTEXTS", "FEATURES", "INPUTS", "OPTIMIZERS", "STEP_CHANGES"]

FEATURES: dict[str, Feature] = {feature.name: feature for feature in (*ATTRIBUTES,)}
