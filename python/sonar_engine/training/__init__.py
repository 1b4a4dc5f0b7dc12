"""Training of draft heads with the engine that serves them: data, capture, fit, evaluate (`sonar train`)."""
