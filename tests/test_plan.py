"""The plan: lengths, scalars, events, fingerprints, and what it refuses."""

import json
import math

import optax
import pytest

from tunix_progdistill import plan as plan_lib
from tunix_progdistill.plan import run

Stage, StagePlan, anneal = plan_lib.Stage, plan_lib.StagePlan, plan_lib.anneal


def three(**kwargs):
  return StagePlan(
      stages=(
          Stage(freeze_fraction=0.8, updates=3, learning_rate=1e-4),
          Stage(freeze_fraction=0.5, updates=3, learning_rate=5e-5),
          Stage(learning_rate=1e-5),
      ),
      **kwargs,
  )


def test_stages_by_update():
  plan = three().resolve()
  assert [plan.stage_at(u) for u in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
  assert plan.updates is None  # the last stage is open
  assert plan.scalars(4).learning_rate == 5e-5


def test_epochs_become_updates():
  plan = StagePlan(stages=(Stage(epochs=1.5), Stage(epochs=2)))
  assert plan.resolve(updates_per_epoch=10).starts() == (0, 15)
  assert plan.resolve(updates_per_epoch=10).updates == 35
  with pytest.raises(ValueError, match="updates_per_epoch must be known"):
    plan.resolve()


def test_document_preset():
  plan = StagePlan.three_stages().resolve(updates_per_epoch=4, max_steps=60)
  assert plan.starts() == (0, 20, 40)
  selectors = [s.stage.selector for s in plan.stages]
  assert selectors == [
      {"freeze_fraction": 0.8},
      {"freeze_fraction": 0.5},
      {"freeze_fraction": 0.0},
  ]
  rates = [plan.scalars(u).learning_rate for u in (0, 20, 40)]
  assert rates == pytest.approx([1e-4, 5e-5, 1e-5])
  assert plan.scalars(0).temperature == 3.0
  assert plan.scalars(59).temperature == 1.0
  assert plan.scalars(0).alpha == 0.5


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 2.5), ("cosine", 2.5), ("exponential", 2.0)],
)
def test_anneal(kind, middle):
  schedule = anneal(4.0, 1.0, kind, updates=11)
  assert schedule(0) == 4.0
  assert schedule(5) == pytest.approx(middle)
  assert schedule(10) == pytest.approx(1.0)
  assert schedule(1000) == pytest.approx(1.0)


def test_anneal_from_a_mapping():
  """As a YAML has it, in a stage and in a plan."""
  fields = {"start": 4.0, "end": 1.0, "shape": "cosine", "updates": 9}
  expected = anneal(4.0, 1.0, "cosine", updates=9)
  plan = StagePlan.from_mapping(
      {"stages": [{"temperature": fields}], "temperature": fields}
  )
  assert plan.temperature == plan.stages[0].temperature == expected


def test_scalar_comes_from_stage_then_plan_then_default():
  plan = StagePlan(
      stages=(Stage(updates=2, temperature=4.0), Stage(updates=2)),
      temperature=3.0,
  ).resolve(temperature=2.0, alpha=0.25)
  assert plan.scalars(0).temperature == 4.0
  assert plan.scalars(2).temperature == 3.0
  assert plan.scalars(0).alpha == 0.25
  assert plan.scalars(0).learning_rate is None


def test_stage_schedule_counts_its_own_updates():
  warmup = optax.linear_schedule(0.0, 1.0, 2)
  plan = StagePlan(
      stages=(
          Stage(updates=3, learning_rate=0.5),
          Stage(updates=3, learning_rate=warmup),
      )
  ).resolve()
  rates = [plan.scalars(u).learning_rate for u in range(6)]
  assert rates == pytest.approx([0.5, 0.5, 0.5, 0.0, 0.5, 1.0])


def test_plan_schedule_counts_the_run():
  plan = three(temperature=anneal(3.0, 1.0, "linear")).resolve(max_steps=9)
  taus = [plan.scalars(u).temperature for u in range(9)]
  assert taus == pytest.approx([3 - 0.25 * u for u in range(9)])


def test_advance_event_ends_a_stage_early():
  plan = three().resolve()
  events = (plan_lib.Event(update=1, kind="advance"),)
  assert plan.starts(events) == (0, 1, 4)
  assert plan.stage_at(0, events) == 0
  assert plan.stage_at(1, events) == 1
  assert plan.scalars(4, events).learning_rate == 1e-5


def test_scale_rate_event():
  plan = three().resolve()
  events = (plan_lib.Event(update=2, kind="scale_rate", value=0.5),)
  assert plan.scalars(1, events).learning_rate == 1e-4
  assert plan.scalars(2, events).learning_rate == 5e-5


def test_run_state_survives_json_and_only_grows():
  state = plan_lib.RunState().append(plan_lib.Event(update=3, kind="advance"))
  assert plan_lib.RunState.from_json(
      json.loads(json.dumps(state.to_json()))
  ) == state
  with pytest.raises(ValueError, match=r"event\.update must not lie before"):
    state.append(plan_lib.Event(update=2, kind="advance"))
  with pytest.raises(ValueError, match=r"event\.kind must be one of"):
    plan_lib.Event(update=0, kind="typo")


def test_fingerprint_tells_what_changed():
  old = three(temperature=2.0).resolve().fingerprint()
  assert json.loads(json.dumps(old)) == old
  same = three(temperature=2.0).resolve().fingerprint()
  assert run.differences(old, same) == []
  new = three(temperature=3.0).resolve().fingerprint()
  assert run.differences(old, new)[0] == "stages[0].temperature: 2.0 -> 3.0"
  schedules = [
      three(temperature=optax.linear_schedule(3.0, end, 5)).resolve()
      for end in (1.0, 2.0)
  ]
  changed = run.differences(*(s.fingerprint() for s in schedules))
  assert any("temperature" in d for d in changed)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"freeze_fraction": 1.2}, r"freeze_fraction must lie in \[0, 1\]"),
        ({"freeze_fraction": -0.1}, r"freeze_fraction must lie in \[0, 1\]"),
        ({"freeze_fraction": math.nan}, "freeze_fraction must lie in"),
        ({"freeze_fraction": "80%"}, "freeze_fraction must lie in"),
        ({"trainable_layers": 0}, "trainable_layers must be a whole number"),
        ({"trainable": ()}, "trainable must hold at least one regex"),
        ({"frozen": ("a",), "trainable": ("b",)}, "must not be given together"),
        ({"updates": 0}, "updates must be a whole number >= 1, got 0"),
        ({"updates": 2.5}, "updates must be a whole number"),
        ({"updates": True}, "updates must be a whole number"),
        ({"epochs": 0}, "epochs must be > 0"),
        ({"epochs": math.inf}, "epochs must be > 0"),
        ({"updates": 1, "epochs": 1}, "must not be given together"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": -1}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be > 0"),
        ({"temperature": anneal(3.0, 0.0, "linear")}, r"temperature\.end"),
        ({"alpha": 1.5}, r"alpha must lie in \[0, 1\], got 1.5"),
        ({"alpha": anneal(-1.0, 0.0, "linear")}, r"alpha\.start must lie"),
        ({"learning_rate": -1e-3}, "learning_rate must be >= 0"),
    ],
)
def test_stage_refuses(kwargs, message):
  with pytest.raises(ValueError, match=message) as e:
    Stage(**kwargs)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StagePlan(stages=()), "stages must hold at least one stage"),
        (
            lambda: StagePlan(stages=(Stage(), Stage())),
            r"stages\[0\] must have a length",
        ),
        (lambda: StagePlan(stages=("x",)), r"stages\[0\] must be a Stage"),
        (lambda: StagePlan(stages=(Stage(),), alpha=2), "alpha must lie"),
        (lambda: anneal(3.0, 1.0, "quadratic"), r"anneal\.kind must be one of"),
        (lambda: anneal(3.0, 0.0, "exponential"), "must both be > 0"),
        (lambda: anneal(3.0, math.inf, "linear"), r"anneal\.end must be a"),
        (lambda: anneal(3.0, 1.0, "linear", updates=0), r"anneal\.updates"),
        (
            lambda: Stage(temperature={"start": 3.0, "end": 1.0}),
            "temperature must hold start, end, shape and perhaps updates",
        ),
        (
            lambda: Stage(alpha={"start": 1.0, "end": 2.0, "shape": "linear"}),
            r"alpha\.end must lie in \[0, 1\]",
        ),
        (
            lambda: three(temperature=anneal(3.0, 1.0, "linear")).resolve(),
            r"temperature\.updates must be known",
        ),
        (
            lambda: three(
                temperature=optax.linear_schedule(1.0, -1.0, 4)
            ).resolve(),
            "at update 2: temperature must be > 0",
        ),
    ],
)
def test_plan_refuses(make, message):
  with pytest.raises(ValueError, match=message) as e:
    make()
  assert "\n" not in str(e.value)
