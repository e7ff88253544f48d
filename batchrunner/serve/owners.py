"""Owners of files and batches: their API keys, their shares of the engine, and their limits.

Each entry of the file given by `--keys` is an owner. A server without this file has one owner, who sees
everything. Keys are never logged, written or returned, and are compared by their SHA-256.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError, model_validator

from batchrunner.core.errors import JobError
from batchrunner.dispatch.sharing import Account
from batchrunner.output.files import using_run, write_json
from batchrunner.serve.api_errors import QUOTA, RATE_LIMIT, ApiError
from batchrunner.serve.state import OWNER, Record

log = logging.getLogger(__name__)

DAY_S = 86_400
RETRY_AFTER_S = 60
"""Seconds after which a client may repeat a call that exceeds the owner's limit of batches or requests."""
CALLS_A_SECOND = 50.0
"""Maximum number of calls a second of each owner except admins."""
MOST_CALLS_AT_ONCE = 200.0
"""Maximum number of calls that an owner may make at once after a pause."""


class Owner(BaseModel):
    """An owner of files and batches: an entry of the file given by `--keys`."""

    # In a header, spaces around a key do not count. YAML's block texts end with a line break.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, str_strip_whitespace=True
    )

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key: SecretStr | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the key in hexadecimal, if the file does not contain the key itself."""
    share: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Weight of the owner if several owners use the engine."""
    max_batches: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of unfinished batches."""
    max_queued_requests: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of requests of unfinished batches that have no result yet."""
    max_tokens_per_day: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of prompt and output tokens a day (UTC). After that, the owner's batches pause."""
    admin: bool = False
    """Whether the owner sees the files and batches of all owners, and the metrics."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either `key` or `sha256`")
        if self.key is not None and not self.key.get_secret_value():
            raise ValueError("`key` is empty")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the key, as hexadecimal digits."""
        return self.sha256 or digest_of(self.key.get_secret_value() if self.key else "")

    def may_see(self, record: Record) -> bool:
        """Tell whether this owner may see a file or batch. For any other owner, it does not exist."""
        return self.admin or record.get(OWNER) == self.name

    def view(self, record: Record) -> Record:
        """Return a file or batch as the API shows it. Only admins of several owners see its owner."""
        if self.admin and record.get(OWNER):
            return record
        return {key: value for key, value in record.items() if key != OWNER}


ONLY_OWNER = Owner.model_construct(name="", admin=True)
"""The owner of everything on a server without `--keys`."""
_read_owners = TypeAdapter(list[Owner])


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key as hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def read_owners(path: Path) -> list[Owner]:
    """Read the owners from a file of keys. The text of a JobError quotes nothing of the file."""
    try:
        tree = yaml.safe_load(path.read_text("utf-8-sig"))
        owners = _read_owners.validate_python(tree, strict=True)
    except OSError as failure:
        raise JobError(f"--keys {path}: cannot be read: {failure.strerror}") from None
    except ValidationError as failure:
        error = failure.errors(include_input=False, include_url=False)[0]
        # The message must not show a misplaced key. So it shows only known field names and positions.
        place = [part for part in error["loc"] if isinstance(part, int) or part in Owner.model_fields]
        where = f"entry {place[0] + 1}" if place and isinstance(place[0], int) else "the file"
        field = f", {place[1]}" if len(place) > 1 else ""
        raise JobError(f"--keys {path}: {where}{field}: {error['msg']}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as failure:
        mark = getattr(failure, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise JobError(f"--keys {path}: is not valid YAML{line}") from None
    for field, what in (("name", "names"), ("digest", "keys")):
        if len({getattr(owner, field) for owner in owners}) < len(owners):
            raise JobError(f"--keys {path}: two entries have equal {what}", hint="give different ones")
    if not owners:
        raise JobError(f"--keys {path}: has no entry", hint="give each owner a `name` and a `key`")
    return owners


class Owners:
    """The owners of a server, and what each of them has used."""

    def __init__(self, keys: Path | None, only_key: str, *, usage: Path) -> None:
        """Read the owners from the file `keys`, and today's used tokens from `usage`. Raises JobError.

        Without `keys`, there is one owner. Its API key is `only_key`, which is empty if it needs none.
        """
        self._keys, self._usage = keys, usage
        self.need_key = keys is not None or bool(only_key)
        """Whether each call needs an API key."""
        if keys is None:
            self._owners = [ONLY_OWNER.model_copy(update={"sha256": digest_of(only_key)})]
        else:
            self._owners = read_owners(keys)
        self._accounts: dict[str, Account] = {}
        """Account (cost and limits) of each owner who had a batch since the server's start, by the owner's
        name."""
        self._calls: dict[str, tuple[float, float]] = {}
        """For each owner, by name: the calls that it may make at once, and when this number was computed."""
        self._day = _today()
        with using_run(str(usage)):
            # Without a file of keys there are no token limits, so no numbers are saved.
            stored = json.loads(usage.read_bytes()) if keys is not None and usage.exists() else {}
        self._tokens: dict[str, int] = stored["tokens"] if stored.get("day") == self._day else {}
        """Today's used tokens, by owner's name, as they were last read or saved."""

    @property
    def has_key_file(self) -> bool:
        """Whether the server has a file of keys, so that files and batches have owners."""
        return self._keys is not None

    @property
    def names(self) -> list[str]:
        """Names of the owners. Without a file of keys, there is one owner, with an empty name."""
        return [owner.name for owner in self._owners]

    def read_again(self) -> None:
        """Read the file of keys again. If it is wrong, log one line and keep the old keys."""
        assert self._keys is not None
        try:
            self._owners = read_owners(self._keys)
        except JobError as failure:
            log.warning("%s; the old keys stay in force", failure)
            return
        log.warning("--keys %s: read again, %d owners", self._keys, len(self._owners))
        # Accounts that do not exist yet will get the new limits.
        for owner in self._owners:
            if owner.name in self._accounts:
                account = self._accounts[owner.name]
                account.change_share(owner.share)
                account.most_tokens = owner.max_tokens_per_day

    def owner_of(self, key: str) -> Owner | None:
        """Return the owner of an API key; None if nobody has this key.

        Every key is compared, so that the response time does not reveal which key nearly matched.
        """
        digest = digest_of(key)
        matching = [owner for owner in self._owners if hmac.compare_digest(owner.digest, digest)]
        return matching[0] if matching else None

    def part_of(self, owner: Owner) -> float:
        """Return the fraction of the disk space and of the files that an owner may use, from 0 to 1."""
        return owner.share / sum(each.share for each in self._owners) if self.has_key_file else 1.0

    def account_of(self, name: str) -> Account:
        """Return the account to which an owner's batches are charged.

        Without a file of keys, each batch has its own account, so that batches have equal shares.
        """
        if not self.has_key_file:
            return Account()
        # Accounts are created when first used. `read_again` changes them when the file of keys changes.
        if name not in self._accounts:
            account = self._accounts[name] = Account(tokens=self._tokens.get(name, 0))
            for owner in self._owners:
                if owner.name == name:
                    account.share, account.most_tokens = owner.share, owner.max_tokens_per_day
        return self._accounts[name]

    def count_call(self, owner: Owner, calls: float = 1.0) -> None:
        """Count calls of an owner; raises ApiError if there are too many a second.

        This is a token bucket: the number of available calls grows by CALLS_A_SECOND each second, up to
        MOST_CALLS_AT_ONCE. Each call takes one, and is refused if none is available. The number may become
        negative, because a call for a long list counts as several.
        """
        if owner.admin:
            return
        now = time.monotonic()
        available, computed_at = self._calls.get(owner.name, (MOST_CALLS_AT_ONCE, now))
        available = min(MOST_CALLS_AT_ONCE, available + (now - computed_at) * CALLS_A_SECOND)
        if available <= 0:
            raise ApiError(429, "Too many calls a second.", code=RATE_LIMIT, retry_after_s=1)
        self._calls[owner.name] = available - calls, now

    def check_limits(self, owner: Owner, batches: list[Record]) -> None:
        """Raise ApiError if an owner with these unfinished `batches` may not create another one."""
        self._start_day()
        if self.account_of(owner.name).is_paused:
            raise ApiError(
                429,
                f"You used all of your {owner.max_tokens_per_day} tokens of this day (UTC).",
                code=QUOTA,
                # The number of tokens is reset at midnight (UTC).
                retry_after_s=seconds_left_of_day(),
            )
        # The number of requests is unknown until the file is validated, but a batch has at least one.
        excess = self.excess_of_queue(owner.name, batches, new=1)
        if owner.max_batches is not None and len(batches) >= owner.max_batches:
            excess = f"You have {len(batches)} unfinished batches, and your limit is {owner.max_batches}."
        if excess is not None:
            raise ApiError(429, excess, code=RATE_LIMIT, retry_after_s=RETRY_AFTER_S)

    def excess_of_queue(self, name: str, batches: Iterable[Record], *, new: int) -> str | None:
        """Return an error text if `new` requests exceed an owner's limit of queued requests, else None.

        `batches` are the owner's other unfinished batches.
        """
        limits = (owner.max_queued_requests for owner in self._owners if owner.name == name)
        limit = next(limits, None)
        queued = sum(map(queued_requests, batches))
        if limit is None or queued + new <= limit:
            return None
        return f"You have {queued} queued requests, and {new} more exceed the limit: your limit is {limit}."

    def tokens_of_day(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the model tokens that each owner has used today, and each owner's daily limit.

        Owners without a limit have no entry in the second mapping. Both mappings are empty if the server has
        no API keys.
        """
        self._start_day()
        # Accounts have the newest numbers. Owners without a batch since the server's start have only the
        # number that was read from the disk.
        used = {**self._tokens, **{name: account.tokens for name, account in self._accounts.items()}}
        limits = {
            owner.name: owner.max_tokens_per_day
            for owner in self._owners
            if owner.max_tokens_per_day is not None
        }
        return used, limits

    async def save_usage(self) -> None:
        """Save how many tokens each owner has used today. Raises StorageError."""
        if not self.has_key_file:
            return
        self._start_day()
        # Owners without an account keep the number that was read from the disk.
        self._tokens |= {name: account.tokens for name, account in self._accounts.items()}
        await asyncio.to_thread(write_json, self._usage, {"day": self._day, "tokens": {**self._tokens}})

    def _start_day(self) -> None:
        """Set the used tokens of all owners to 0 if the day has changed."""
        today = _today()
        if today != self._day:
            self._day, self._tokens = today, {}
            for account in self._accounts.values():
                account.tokens = 0


def queued_requests(batch: Record) -> int:
    """Return the number of requests of a batch that have no result yet."""
    counts: dict[str, Any] = batch["request_counts"]
    return int(counts["total"] - counts["completed"] - counts["failed"])


def seconds_left_of_day() -> int:
    """Return the seconds until midnight (UTC), rounded up to at least 1."""
    return DAY_S - int(time.time()) % DAY_S


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
