"""What HELIOS' benchmark says of its flags, before a model is opened."""

import re

import pytest
from absl import flags as absl_flags
from launchers import call

from eejax.common.errors import ConfigError


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--blocks=0", "flag --blocks=0: 0 is not a positive integer"),
        ("--sampled=0", "flag --sampled=0: 0 is not a positive integer"),
        ("--audited=0", "flag --audited=0: 0 is not a positive integer"),
        ("--slots=0", "flag --slots=0: 0 is not a positive integer"),
        ("--clients=-1", "flag --clients=-1: -1 is not a positive integer"),
        ("--early=1.5", "flag --early=1.5: 1.5 is not a number in the range [0.0, 1.0]"),
        ("--early=nan", "--early = nan: must lie in [0, 1]."),
        ("--orders=", "--orders = '': must be at least one of blocked, shuffled, drifting."),
        (
            "--orders=shuffled,sorted",
            "--orders = 'shuffled,sorted': must be at least one of blocked, shuffled",
        ),
        ("--curve=", "--curve = '': must be numbers in (0, 1], one at least."),
        ("--curve=0.9,0", "--curve = '0.9,0': must be numbers in (0, 1]"),
        ("--curve=nan", "--curve = 'nan': must be numbers in (0, 1]"),
        ("--curve=much", "--curve = 'much': must be numbers"),
        ("--late=0", "--late = 0.0: must be a number of seconds above 0."),
        ("--late=nan", "--late = nan: must be a number of seconds above 0."),
        ("--late=inf", "--late = inf: must be a number of seconds above 0."),
    ],
)
def test_flags_are_checked_before_a_model_is_opened(flag, said):
    wrong = (ConfigError, absl_flags.IllegalFlagValueError)
    with pytest.raises(wrong, match=f"^{re.escape(said)}"):
        call("eejax.experiments.bench_helios", "--small=/none", "--large=/none", flag)
