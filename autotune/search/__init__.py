"""Search strategies: the launch-aware default, its models, and Optuna's samplers behind the same protocol."""
