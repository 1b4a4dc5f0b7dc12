"""From logits to tokens: parameters, state by slot, processing, coins, log-probabilities."""
