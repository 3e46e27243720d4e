"""One run, from a config to a report."""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Any

from absl import logging
import jax
import tqdm

from tunix_progdistill import data
from tunix_progdistill import report
from tunix_progdistill import schema
from tunix_progdistill import strategy as strategy_lib
from tunix_progdistill import students
from tunix_progdistill import trainer as trainer_lib
from tunix_progdistill import weights
from tunix_progdistill.families import causal_lm
from tunix_progdistill.monitor import metrics_file
from tunix_progdistill.run import backends
from tunix_progdistill.run import folder as folder_lib
from tunix_progdistill.run import models as models_lib
from tunix_progdistill.run import samples
from tunix_progdistill.run import summary as summary_lib
from tunix_progdistill.run import tables
from tunix_progdistill.run import unigram
from tunix_progdistill.run import watch
from tunix_progdistill.weights import cache

BEFORE, AFTER, TEACHER = "student before", "student after", "teacher"
FLOOR = "unigram floor"


class _Evaluation:
  """Held-out batches behind a progress bar; readable again and again."""

  def __init__(self, batches: Any):
    self._batches = batches

  def __len__(self) -> int:
    return len(self._batches)

  def __iter__(self) -> Iterator[Any]:
    return iter(
        tqdm.tqdm(
            self._batches, desc="evaluate", unit="batch", leave=False,
            disable=None,
        )
    )


def train(
    config: schema.RunConfig, *, command: str, restart: bool = False
) -> pathlib.Path:
  """Distills as `config` says; the same call again goes on where it stopped.

  Args:
    config: of the run.
    command: that makes the run again, for its folder.
    restart: forget the run that lies in the folder.

  Returns:
    The run's folder.

  Raises:
    ValueError: the config cannot work; nothing was loaded or written then.
    ModuleNotFoundError: a package that the config asks for is not installed.
    RuntimeError: the run ended before its time.
    KeyboardInterrupt: it was stopped; its text says where it goes on.
  """
  config.check()
  mesh = models_lib.make_mesh(config.model_config.mesh, "model_config")
  with folder_lib.RunFolder(config.run_directory) as folder:
    root = config.checkpoint_directory()
    folder.check_root(root, restart=restart)
    _use_compile_cache()
    with folder.begin(
        text=schema.to_yaml(config), command=command, root=root,
        restart=restart,
    ):
      run = _Run(config, folder, mesh)
    try:
      with run.models.on_mesh():
        text = run.train()
    except KeyboardInterrupt:
      report.write(folder.path)
      raise KeyboardInterrupt(run.stopped()) from None
    except RuntimeError:
      report.write(folder.path)
      raise
  path = report.write(folder.path)
  print(f"\n{text}\n\nstudent  {folder / 'student'}\nreport   {path}")
  return folder.path


def _use_compile_cache() -> None:
  """Keeps compiled programs between runs, unless the user says where."""
  if jax.config.values["jax_compilation_cache_dir"] is None:
    jax.config.update(
        "jax_compilation_cache_dir", str(cache.root() / "jax")
    )


class _Run:
  """Models, data and trainer of one run, and what is made of them."""

  def __init__(
      self, config: schema.RunConfig, folder: folder_lib.RunFolder, mesh: Any
  ):
    self._config = config
    self._folder = folder
    source = config.data()
    cut = config.teacher().vocabulary_size is not None
    texts = data.training_texts(source) if cut else None
    self.models = models_lib.load(config, texts, mesh)
    folder.check_same(
        "the teacher's weights", models_lib.digest(self.models.teacher.model)
    )
    self._data = data.open_datasets(
        source, self.models.tokenizer, add_eos=config.tokenizer_config.add_eos
    )
    folder.check_same("held-out data", self._data.eval.fingerprint)
    self.models = self.models.compared(self._data.eval)
    weights.check_export(folder / "student", self.models.student)
    self._metrics = metrics_file.MetricsFile(folder / "metrics.jsonl")
    student = self.models.student.model
    with self.models.on_mesh():
      self._before = self._continuations(student)
      self._trainer = self._make_trainer()  # restores into the student

  def train(self) -> str:
    """Trains, and writes all that the run folder holds but the report.

    Returns:
      The tables to be printed.
    """
    student, trainer = self.models.student.model, self._trainer
    size = students.num_parameters
    with summary_lib.Summary(
        self._folder / "summary.json", title=self._folder.path.name,
        plan=trainer.engine.plan, targets=self._targets(),
    ) as summary:
      summary.notes = self.models.notes()
      for name, model in (
          (TEACHER, self.models.teacher.model), (BEFORE, student)
      ):
        if name not in summary.models:
          summary.set_model(name, parameters=size(model))
      logging.info(
          "Teacher: %s parameters. Student: %s, %.1f %% of them.",
          f"{size(self.models.teacher.model):,}", f"{size(student):,}",
          100 * size(student) / size(self.models.teacher.model),
      )
      self._record()
      trainer.with_training_hooks(
          watch.Watcher(
              summary,
              trainer.config.get_with_default("gradient_accumulation_steps", 1),
          )
      )
      try:
        trainer.train(self._data.train, _Evaluation(self._data.eval))
      finally:
        summary.updates = trainer.train_steps
      self._conclude(summary)
      self._export()
    return tables.text(summary, self._metrics.records("eval"))

  def _export(self) -> None:
    """Writes the student, its adapters in its weights."""
    model = self._trainer.model
    lora = self._config.model_config.lora_config
    if lora:
      model = students.merged(model, alpha=lora["alpha"])
    weights.export(
        model, self._folder / "student", loaded=self.models.student
    )

  def stopped(self) -> str:
    """What a user who stops the run must know."""
    manager = self._trainer.checkpoint_manager
    newest = manager.latest_step() if manager else None
    return (
        f"stopped at update {self._trainer.train_steps}; the same command "
        f"goes on from update {newest or 0}, the newest checkpoint"
    )

  def _continuations(self, model: Any) -> list[str]:
    return samples.continuations(
        model, self.models.tokenizer, self._config.prompts,
        self._config.prompt_tokens,
    )

  def _targets(self) -> dict[str, float]:
    wanted = dataclasses.asdict(self._config.targets)
    return {f"distill/{k}": v for k, v in wanted.items() if v is not None}

  def _make_trainer(self) -> trainer_lib.ProgressiveDistillationTrainer:
    config, lm = self._config, causal_lm
    accumulation = config.training_config.gradient_accumulation_steps or 1
    batches = self._data.train
    training = config.training(
        updates_per_epoch=-(-batches.batches_per_epoch // accumulation),
        available=-(-len(batches) // accumulation),
    )
    options = (
        config.training_config.metrics_logging_options
        or schema.MetricsLoggingOptions()
    )
    training.metrics_logging_options = backends.tunix_options(
        config.logging,
        log_dir=options.log_dir or str(self._folder / "tensorboard"),
        project=options.project_name,
        run=options.run_name or self._folder.path.name,
        flush_every_n_steps=options.flush_every_n_steps,
    )
    return trainer_lib.ProgressiveDistillationTrainer(
        self.models.student.model,
        self.models.teacher.model,
        strategy_lib.ProgressiveLogitStrategy(
            lm.forward, lm.forward, lm.next_token_labels,
            student_hidden_fn=lm.hidden, teacher_hidden_fn=lm.hidden,
        ),
        config.optimizer(),
        training,
    )

  def _record(self) -> None:
    """Sends the records to metrics.jsonl, from where the run goes on."""
    trainer = self._trainer
    if "jsonl" not in self._config.logging:
      return
    self._metrics.rewind(trainer.train_steps)
    end = trainer.config.max_steps
    if trainer.train_steps and (end is None or trainer.train_steps < end):
      logging.info("Going on from update %d.", trainer.train_steps)
      self._metrics.write(
          "event", trainer.train_steps,
          {"event": "resume", "value": trainer.train_steps},
      )
    trainer.with_record_sink(self._metrics.write)

  def _conclude(self, summary: summary_lib.Summary) -> None:
    """The models side by side: by numbers and by what they say.

    Raises:
      RuntimeError: there is no student worth the name.
    """
    trainer = self._trainer
    trained = self._metrics.records("train")
    idle = [r for r in trained if not r["distill/valid_tokens"]]
    if trained and len(idle) == len(trained):
      raise RuntimeError(
          f"the run must change the student, but all {len(trained)} updates "
          "did nothing: no token counted, or no loss was finite; check rates, "
          "temperature, labels and masks"
      )
    if idle:
      summary.notes.append(
          f"{len(idle)} of {len(trained)} updates did nothing, for no token "
          "counted or no loss was finite."
      )
    logging.info("Comparing the models.")
    teacher, student = self.models.teacher.model, trainer.model
    size = students.num_parameters
    evaluated = self._metrics.records("eval")
    began = bool(evaluated) and evaluated[0]["update"] == 0
    first = evaluated[0] if began else None
    if evaluated and evaluated[-1]["update"] == trainer.train_steps:
      last = evaluated[-1]
    else:
      last = trainer.evaluate(_Evaluation(self._data.eval))
      watch.log_evaluation(trainer.train_steps, trainer.config.max_steps, last)
      if "jsonl" in self._config.logging:
        self._metrics.write("eval", trainer.train_steps, last)
      watch.check_finite(last["distill/kl_div_tau1"], trainer.train_steps)
    summary.set_model(
        TEACHER, parameters=size(teacher), evaluation=last, who="teacher"
    )
    summary.set_model(BEFORE, parameters=size(student), evaluation=first)
    summary.set_model(AFTER, parameters=size(student), evaluation=last)
    log_p = unigram.log_probs(
        dataclasses.replace(self._data.train, epochs=1),
        len(self.models.tokenizer),
    )
    summary.models[FLOOR] = {
        "name": FLOOR, "parameters": len(log_p),
        **unigram.floor(teacher, log_p, _Evaluation(self._data.eval)),
    }
    said = {
        TEACHER: self._continuations(teacher), BEFORE: self._before,
        AFTER: self._continuations(student),
    }
    summary.samples = [
        {"prompt": prompt, "continuations": {k: v[i] for k, v in said.items()}}
        for i, prompt in enumerate(self._config.prompts)
    ]
