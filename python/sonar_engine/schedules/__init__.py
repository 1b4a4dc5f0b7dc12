"""A step as a short list of stages. `orders` has the lists, `stages` what each stage does."""
