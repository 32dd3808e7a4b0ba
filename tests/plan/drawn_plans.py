"""Plans of every kind for properties of programs, drawn by hypothesis."""

from hypothesis import strategies as st
from small_plans import small_plan

from headrace.plan.value.choices import Hosted
from headrace.plan.value.plan import Plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_blocks = draw(st.integers(2, 6))
    separate = draw(st.booleans())
    prefetch = draw(st.integers(0, 2))
    policy = draw(st.sampled_from(["immediate", "deferred", "speculative"]))
    hosted = Hosted(coming=draw(st.integers(1, 3)), going=draw(st.integers(1, 3))) if separate and draw(st.booleans()) else None
    homes = st.sampled_from(["host", "ssd"] if hosted else ["device", "host", "ssd"] if separate else ["device", "ssd"])
    stash = tuple(draw(st.lists(homes, min_size=num_blocks, max_size=num_blocks)))
    units = num_blocks + draw(st.sampled_from([2, 2, 1]))
    resident = draw(st.sets(st.integers(0, units - 1))) if policy == "deferred" else set()
    late = set(range(units)) if policy == "deferred" else draw(st.sets(st.integers(0, units - 1)))
    return small_plan(
        num_blocks,
        separate_device=separate,
        prefetch=prefetch,
        host_slots=draw(st.integers(max(2, prefetch + 1), num_blocks + 2)),
        device_slots=draw(st.integers(prefetch + 1, num_blocks + 1)) if separate else 0,
        update_policy=policy,
        late_units=tuple(sorted(late)),
        held_gradients=draw(st.sampled_from(["host", "ssd"])),
        stash_tiers=stash,
        kept_bytes=tuple(draw(st.sampled_from([0, 512])) for _ in stash),
        hosted=hosted,
        stash_slots=draw(st.integers(2, 12)) if "ssd" in stash else 0,
        pages=separate and draw(st.booleans()),
        accumulators=draw(st.integers(1, 2)) if separate else 1,
        state_slots=draw(st.integers(1, 4)),
        gradient_slots=draw(st.integers(1, 3)),
        accumulate=draw(st.booleans()),
        tied=draw(st.booleans()),
        resident_states=tuple(sorted(resident)),
        device_update_every=draw(st.integers(0, 4)),
        units=small_plan(num_blocks).units[:units],
        checkpoint_every=draw(st.integers(1, 3)) if policy == "deferred" else 1,
    )
