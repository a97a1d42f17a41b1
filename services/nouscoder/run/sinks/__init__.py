"""Sinks: copies of metrics.jsonl in other tools (TensorBoard, Weights & Biases, MLflow)."""
