//! Model files: formats, tensors, configuration, tokenizers.
