"""The grammar: tables of features, changes, inputs, contexts and optimizers, each a few lines of Python text."""
