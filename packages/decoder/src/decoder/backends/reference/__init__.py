"""The reference: transformers' own modules, one masked softmax. What every other backend is compared with."""
