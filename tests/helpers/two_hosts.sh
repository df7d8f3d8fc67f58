#!/bin/sh
# Runs one command on each of two "hosts": network namespaces with a cable between them.
#
#     two_hosts.sh COMMAND...
#
# The command is run with HOST=0 and ADDRESS=10.77.0.1, and with HOST=1 and ADDRESS=10.77.0.2;
# CABLE is the name of the network interface. Ends with the first exit code that is not 0.
# No privileges are needed where the kernel lets users make namespaces.
set -eu

if [ "${INSIDE:-}" != 1 ]; then
    INSIDE=1 exec unshare --user --map-root-user --net --mount -- "$0" "$@"
fi
mount -t tmpfs none /run
mkdir /run/netns
ip netns add host0
ip netns add host1
ip link add cable netns host0 type veth peer name cable netns host1
for host in 0 1; do
    ip -n host$host address add 10.77.0.$((host + 1))/24 dev cable
    ip -n host$host link set cable up
    ip -n host$host link set lo up
done
HOST=0 ADDRESS=10.77.0.1 CABLE=cable ip netns exec host0 "$@" &
first=$!
code=0
HOST=1 ADDRESS=10.77.0.2 CABLE=cable ip netns exec host1 "$@" || code=$?
wait $first || code=$?
exit $code
