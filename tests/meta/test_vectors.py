"""Tests compile for the instructions that torch's compiler would find by a trial in every process."""

import pytest
from torch._inductor import config, cpu_vec_isa


@pytest.mark.skipif(config.cpp.vec_isa_ok is None, reason="the C++ compiler has them tried")
def test_what_the_processor_has_is_what_a_trial_finds() -> None:
    """`conftest.py` leaves the trials out; else programs of tests would be others than those of users."""
    found = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
    with config.patch({"cpp.vec_isa_ok": None}):
        assert cpu_vec_isa.valid_vec_isa_list.__wrapped__() == found
