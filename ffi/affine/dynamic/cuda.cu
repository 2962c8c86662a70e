namespace jq {}
