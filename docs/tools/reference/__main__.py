"""Write the pages of reference: what `make docs-reference` does."""

from docs.tools.reference.pages import FOLDER, pages


def main() -> None:
    """Write each page, and delete pages that are no more made."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
