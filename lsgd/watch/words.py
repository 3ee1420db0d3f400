"""Values in words."""


def duration(seconds: float) -> str:
    """Return a time: ``9.5s``, ``3m05s``, ``2h40m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f}s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s"
