"""What users call: arguments in, pipelines called, results out."""
