"""A plan is written and read in one format, and refused by name in any other."""

import json
from pathlib import Path

import pytest
from small_plans import small_plan

from headrace.plan.given import load_plan
from headrace.plan.plan import PLAN_FORMAT, Plan
from headrace.plan.speculation import Speculation
from headrace.terms.errors import ConfigError

PRICES = Speculation(late_units=(1, 2), deferred_seconds=3.0, hit_seconds=2.0, redo_seconds=1.0)


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    plan = small_plan(attention_flops=(1.0,) * 4, spared_flops=(2.0,) * 4, notes=("small",), peak_bytes={"host": {"all": 1}})
    for each in (plan, plan.with_results(speculation=PRICES, allowed_bytes={"host": 7})):
        assert Plan.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize("written", [1, None, 3])
def test_a_plan_of_another_format_is_refused_by_name(written: int | None, tmp_path: Path) -> None:
    values = small_plan().to_json()
    assert values.pop("format") == PLAN_FORMAT == 2
    values |= {} if written is None else {"format": written}
    # The first format had no number, and its results among its choices.
    with pytest.raises(ConfigError, match=f"format {written or 1}, this version reads format 2; use the version"):
        Plan.from_json(values)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"plan.json.*format {written or 1}"):
        load_plan(tmp_path / "plan.json")
