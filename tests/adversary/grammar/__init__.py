"""The grammar: tables of features, changes, inputs, contexts and optimizers, as lines of Python text."""
