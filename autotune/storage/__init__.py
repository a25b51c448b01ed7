"""The study database: Optuna storage, trials and locks."""
