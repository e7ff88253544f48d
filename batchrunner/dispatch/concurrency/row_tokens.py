"""How many tokens of the KV pool a row holds on average, by the rows that have ended. Pure.

A row that is prefilled with p prompt tokens of its own and generates L tokens, one in each pass, holds
p + L/2 on average while it runs. Long rows run longer: p + E[L²] / 2 E[L] is what a row holds on average of
those that run at one moment. The short rows of a run end first: at its beginning the figure is too low, and
limits less than it should.
"""

ENOUGH_ROWS = 100
"""Rows that must have ended before their average is used."""
MEMORY_ROWS = 2000
"""Rows of each scheduler over which the averages are taken: of older ones, less and less is left. Rows that
began together end by their length: fewer than run at once would be the short ones, and then the long ones."""


class RowTokens:
    """The averages over all rows that the engine has ended."""

    def __init__(self) -> None:
        self._memory = MEMORY_ROWS
        self._rows = 0
        self._own = 0.0
        self._output = 0.0
        self._output_squared = 0.0

    def come_from(self, schedulers: int) -> None:
        """Set the number of schedulers that the rows come from."""
        self._memory = MEMORY_ROWS * schedulers

    def add(self, own_prompt_tokens: int, output_tokens: int) -> None:
        """Count a row that ended; the tokens of its prompt without those that the prefix cache held."""
        self._rows += 1
        weight = 1 / min(self._rows, self._memory)
        self._own += weight * (own_prompt_tokens - self._own)
        self._output += weight * (output_tokens - self._output)
        self._output_squared += weight * (output_tokens * output_tokens - self._output_squared)

    @property
    def held(self) -> float | None:
        """Tokens that a running row holds on average; None before enough rows have ended."""
        if self._rows < ENOUGH_ROWS or self._output <= 0:
            return None
        return self._own + self._output_squared / (2 * self._output)
