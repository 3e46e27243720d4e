"""Configs that the tests of the schema start from."""

SMALL = """\
model_config:
  model_source: local
  model_path: models/small
  layers: [0, 2, 5]
data_directory: corpus/*.txt
optimizer_config:
  learning_rate: 1e-3
progressive:
  stages:
    - {freeze_fraction: 0.8, updates: 5, learning_rate: 1e-4}
    - {updates: 5}
"""

# Everything that may be null is there, so that each key below it can be set.
FULL = """\
model_config: &model
  model_source: local
  model_path: models/student
  lora_config: {}
  mesh: {shape: "(1,2)", axis_names: "('fsdp','tp')"}
  vocabulary_size: 512
  layers: [0, 2, 5]
teacher_model_config:
  <<: *model
  model_path: models/teacher
  layers: null
data_directory: corpus/*.txt
num_train_epochs: 9
optimizer_config:
  learning_rate: 1e-3
training_config:
  max_steps: 50
  checkpointing_options: {max_to_keep: 2}
  metrics_logging_options: {project_name: news}
  profiler_options: {log_dir: profile}
  perf_metrics_options: {}
progressive:
  temperature: {start: 3.0, end: 1.0, shape: linear}
  stages:
    - {updates: 5}
    - {name: last}
prompts: [The government, A dog]
"""

# As a user of Tunix's own command may have it: anchors, merge keys and the
# sections of reinforcement learning.
TUNIX = """\
model_config: &model
  model_name: "qwen2.5-0.5b"
  model_source: "huggingface"
  model_id: "Qwen/Qwen2.5-0.5B"
  model_download_path: "/tmp/models"
  intermediate_ckpt_dir: "/tmp/intermediate"
  lora_config: {}
  mesh:
    shape: "(2,2)"
    axis_names: "('fsdp','tp')"
    allocation_policy: "COMPACT"
actor_model_config:
  <<: *model
reference_model_config:
  <<: *model
tokenizer_config:
  tokenizer_path: "Qwen/Qwen2.5-0.5B"
  tokenizer_type: "huggingface"
  add_bos: True
  add_eos: True
data_source: "tfds"
dataset_name: "mtnt/en-fr"
batch_size: 8
num_test_batches: 100
train_fraction: 1.0
tfds_download: True
optimizer_config: &optimizer
  opt_type: "adamw"
  schedule_type: "warmup_cosine_decay_schedule"
  value: 1e-5
  init_value: 0.0
  peak_value: 3e-5
  warmup_ratio: 0.1
  b2: 0.99
  weight_decay: 0.1
  max_grad_norm: 0.1
training_config: &training
  eval_every_n_steps: 2
  max_steps: 20
  checkpoint_root_directory: "/tmp/checkpoints"
  checkpointing_options:
    max_to_keep: 1
    save_interval_steps: 180
    timeout_secs: 1200
  metrics_logging_options:
    log_dir: "/tmp/logging"
    flush_every_n_steps: 20
  perf_metrics_options: {}
  data_sharding_axis: ["fsdp"]
rl_training_config:
  <<: *training
  actor_optimizer_config:
    <<: *optimizer
grpo_config: {beta: 0.08, num_generations: 2}
rollout_config:
  total_generation_steps: 768
rollout_engine: "vanilla"
vllm_config: {}
offload_to_cpu: false
reward_functions:
  - rewards/gsm8k.py
"""
ADDED = """\
teacher_model_config:
  <<: *model
  model_id: "Qwen/Qwen2.5-7B"
progressive:
  stages:
    - {freeze_fraction: 0.8, updates: 5}
    - {freeze_fraction: 0.5, updates: 5}
    - {updates: 10}
"""
