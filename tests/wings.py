"""Which modules are training's own: what generates and what compresses loads none of them."""

OPENER = "headrace.engine.open_model"
# Training's own: its engine, its planner, its plans and schedules, its verbs, and what updates.
TRAINING = (
    *("engine", "runs", "update"),
    *(f"ask.{name}" for name in ("planner", "question", "answer", "variants", "cluster", "explain", "outcome")),
    *(f"plan.search.{name}" for name in ("search", "space", "policy", "given", "serving")),
    *("plan.value.plan", "plan.forecast.footprint", "plan.forecast.forecast", "flow.weights.load"),
    *(f"plan.schedules.{name}" for name in ("train", "updates", "forward", "serve")),
    *(f"flow.step.{name}" for name in ("step", "steps", "step_state", "settle", "compute", "drain")),
)


def of_training(module: str) -> bool:
    names = tuple(f"headrace.{name}" for name in TRAINING)
    return module not in (OPENER, "headrace.engine") and any(module == name or module.startswith(f"{name}.") for name in names)
