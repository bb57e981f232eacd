"""How a user is told that something is wrong: what is, what must be, and what to type."""


class HoldfastError(Exception):
    """Something is wrong that a person can mend; the message says how."""


class ConfigError(HoldfastError):
    """The call is wrong: a key, a value, a name or a combination of them."""


class ContractError(HoldfastError):
    """A world, policy or caller broke the contract it works under."""
