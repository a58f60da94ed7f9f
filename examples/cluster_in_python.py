"""A whole cluster inside one Python program: the same parts as in production, over loopback.

python examples/cluster_in_python.py
"""

import asyncio
from contextlib import closing

from core.config import WorkerPool
from deploy.api_client import ApiClient, Message
from deploy.config_file import Settings, cluster_config
from deploy.local import LocalCluster
from deploy.model_source import resolve_model


def ask(url: str, question: str) -> str:
    with closing(ApiClient(url)) as client:
        deltas = client.chat([Message(role="user", content=question)], max_tokens=48)
        return "".join(delta.text for delta in deltas)


async def main() -> None:
    settings = Settings(port=0, decode=WorkerPool(count=2))
    async with LocalCluster(cluster_config(settings, resolve_model(settings.model))) as cluster:
        # The client blocks; the cluster needs this event loop meanwhile.
        print(await asyncio.to_thread(ask, cluster.url, "What is a piston?"))


if __name__ == "__main__":
    asyncio.run(main())
