"""What a decode or mixed node asks of whoever fills the cache rows of its prompts."""

from abc import ABC, abstractmethod
from typing import Any

from jaxdisagg.active import ActiveRequest


class Prefiller(ABC):
    """Fills the cache rows of all prompt tokens but the last. On the step loop, where not said."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """None, or why no prompt can be prefilled at present. For any thread."""

    @abstractmethod
    def never_fits(self, prompt_length: int) -> str | None:
        """Why such a prompt can never be prefilled, or None. For any thread."""

    @abstractmethod
    def has_room(self, active: ActiveRequest) -> bool:
        """Whether `begin` can take this request now; if not, it waits."""

    @abstractmethod
    def begin(self, active: ActiveRequest) -> None:
        """Start prefilling into the request's leased pages; ends in `node.prefilled` or a fail."""

    @abstractmethod
    def cancel(self, active: ActiveRequest) -> None:
        """Stop for a request that is CANCELLING; ends in `node.prefill_over`."""

    @abstractmethod
    def release(self, active: ActiveRequest) -> None:
        """The request's pages go back to the pool: give back what was leased beside them (R5)."""

    @abstractmethod
    def tick(self, now: float) -> bool:
        """Do what is due. Returns whether there may be more to do at once."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `tick` has something to do by itself."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """The node ends."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Its part of /debug/state. For any thread."""
