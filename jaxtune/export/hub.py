"""Uploads a folder to a model repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtune.models.adapters.adapter_config import CONFIG_NAME
from jaxtune.models.files import model_card


def push(folder: Path, repository: str, *, private: bool = False, api: Any = None) -> str:
    """Uploads a folder as a model repository, made if need be, and returns its address. Files under other names stay in
    it, and so does its card, unless the folder has one that a user wrote.

      folder: of the model.
      repository: owner/name.
      private: of a new repository.
      api: huggingface_hub.HfApi or the like; None: with this machine's login.

    Raises ValueError if nobody is logged in, the name is not valid, or the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    api = HfApi() if api is None else api
    try:
        api.whoami()
        address = api.create_repo(repository, private=private, exist_ok=True)
        whole = getattr(address, "repo_id", repository)  # with its owner, which the name may lack
        kind = "adapter" if (folder / CONFIG_NAME).is_file() else "gguf" if any(folder.glob("*.gguf")) else "merged"
        model_card.write(folder, model_card.of_folder(folder), kind)
        is_theirs = not model_card.is_ours((folder / model_card.NAME).read_text(encoding="utf-8", errors="replace"))
        stays = not is_theirs and api.file_exists(whole, model_card.NAME)  # it may be the user's
        api.upload_folder(
            repo_id=whole,
            folder_path=folder,
            commit_message="Upload by jaxtune export",
            ignore_patterns=[model_card.NAME] if stays else None,
        )
    except LocalTokenNotFoundError:
        raise ValueError(
            f"push: {repository}: this machine is not logged in to the hub; log in (hf auth login), or set HF_TOKEN"
        ) from None
    except HFValidationError as error:
        raise ValueError(f"push: {repository}: not a repository's name: {error}") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "nothing")
        raise ValueError(
            f"push: {repository}: the hub answered {status}; check the name and that your token may write there"
        ) from None
    except (HTTPError, ConnectionError, TimeoutError) as error:  # HTTPError: of the hub's HTTP library, no OSError
        raise ValueError(
            f"push: {repository}: the hub cannot be reached, or the upload broke off ({type(error).__name__}: {error})"
        ) from None
    return str(address)


def require_login(token: str | None = None) -> None:
    """Raises ValueError if the hub takes neither `token` nor this machine's login."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    try:
        HfApi(token=token).whoami()
    except (LocalTokenNotFoundError, HfHubHTTPError, HTTPError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            "push_to_hub = True: the hub does not know this machine's login, or cannot be reached "
            f"({type(error).__name__}): hf auth login, or HF_TOKEN; or push_to_hub=False"
        ) from None
