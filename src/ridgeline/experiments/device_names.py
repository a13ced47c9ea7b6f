"""Devices in the names of result files."""

import re


def model_of(name: str) -> str:
    """The model in a device's name: `H100` of "NVIDIA H100 80GB HBM3"; else its last word."""
    words = name.split()
    models = [word for word in words if re.fullmatch(r"[A-Z]{1,2}\d{2,3}[\w-]*", word)]
    return models[0] if models else words[-1]
