"""Tools that ask services on the network: paper and web search, web pages, rerankers. Extra `tools` for web pages.

Whatever leaves this machine goes through `net`, which refuses addresses that are not public.
"""
