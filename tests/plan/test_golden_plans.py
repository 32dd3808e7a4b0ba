"""No plan changes unseen: what is planned is what is stored, field by field (`golden_plans.py`; `make golden` renews)."""

import json
from collections import Counter

import pytest
from golden_plans import PLANS, QUICK, STORED, changes, compact, other_versions, plan_of, stored, text_of
from tiers import sampled

as_constrained = pytest.mark.skipif(bool(other_versions()), reason=f"golden plans: {', '.join(other_versions())}")


@as_constrained
@pytest.mark.parametrize("name", sampled(PLANS, QUICK))
def test_a_plan_is_as_it_was(name: str) -> None:
    before = json.loads(stored(name).read_text(encoding="utf-8"))
    assert list(changes(before, plan_of(name))) == [], f"if that is meant: make golden NAMES={name}, and say why in the commit"


def test_there_is_a_stored_plan_for_each_question_and_no_other() -> None:
    assert {path.stem for path in STORED.glob("*.json")} == PLANS.keys()
    kinds = Counter(name.split("-")[0] for name in PLANS)
    assert kinds["train"] >= 17
    assert kinds["generate"] >= 8
    assert kinds["compress"] >= 3
    assert kinds["cluster"] >= 2
    assert PLANS.keys() > QUICK


def test_stored_plans_are_written_by_the_command() -> None:
    texts = {name: stored(name).read_text(encoding="utf-8") for name in PLANS}
    assert [name for name, text in texts.items() if text_of(json.loads(text)) + "\n" != text] == []


def test_a_change_is_said_with_its_place() -> None:
    before = compact({"plan": {"host_slots": 3, "stash_tiers": ["ssd"] * 4, "seconds": 1.00000001}, "notes": ["words"]})
    now = compact({"plan": {"host_slots": 4, "stash_tiers": ["ssd"] * 3 + ["host"], "seconds": 1.0}, "notes": ["others"]})
    assert list(changes(before, now)) == [
        "plan.host_slots: was 3, is 4",
        'plan.stash_tiers: was [{"times": 4, "item": "ssd"}], is [{"times": 3, "item": "ssd"}, "host"]',
    ]
    assert list(changes(before, before)) == []
    assert list(changes({"fits": True}, {})) == ['fits: was true, is "(nothing)"']
