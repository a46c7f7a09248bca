"""What a person sees. Text only; the verbs print it."""
