"""What is emitted of a draft: the rules that keep the law, or the text, of the target alone."""
