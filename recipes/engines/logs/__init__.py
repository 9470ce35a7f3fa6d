"""Where figures and images go: TensorBoard, W&B and MLflow."""
