"""Uploads a folder to a model repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def push(folder: Path, repository: str, *, private: bool = False, api: Any = None) -> str:
    """Uploads a folder as a model repository, made if need be, and returns its address. Files under other names stay in
    it.

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
        api.upload_folder(repo_id=whole, folder_path=folder, commit_message="Upload by jaxtune export")
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
