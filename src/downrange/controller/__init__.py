"""The controller: decides which replica of a broker set is its master. Its state lives in etcd."""
