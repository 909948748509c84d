"""The three APIs that clients speak, side by side over one core: chat completions, responses, messages.

Each package reads its requests into an `AnswerRequest` and puts `GenerationEvent`s on the wire as an `AnswerFormat`.
"""
