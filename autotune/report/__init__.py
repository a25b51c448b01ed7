"""The results of a study for people: terminal summary, report, comparison, notes and plots of optuna-dashboard."""
