// SPDX-License-Identifier: Apache-2.0

package judge

// Configurations of the scenarios in scenario.go.

const dnatHash = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}, {name: c, address: 10.0.2.4, port: 8080, weight: 2}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: source-hash,
     backends: [{name: a, address: 10.0.2.5}, {name: b, address: 10.0.2.6}]}
  - {name: range, listen: [{address: 192.0.2.10, ports: [8000-8009]}], protocol: tcp, mode: dnat, scheduler: symmetric-hash,
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::4", port: 5353}, {name: b, address: "fd00:2::5", port: 5353}]}
`

const dnatSequence = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: wrr,
     backends: [{name: a, address: 10.0.2.2, weight: 3}, {name: b, address: 10.0.2.3}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: random, limits: {strict-tcp: true},
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: "fd00:2::2"}]}
`

const least = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: lc,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}, {name: c, address: 10.0.2.4, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, scheduler: wlc, source-pool: [10.0.2.102],
     backends: [{name: a, address: 10.0.2.2, weight: 3}, {name: b, address: 10.0.2.3, max-connections: 40}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: lc, source-pool: [10.0.2.101],
     backends: [{name: a, address: 10.0.2.5, port: 8080}, {name: b, address: 10.0.2.6, port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: wlc,
     backends: [{name: a, address: "fd00:2::2", weight: 2}, {name: b, address: "fd00:2::3"}, {name: c, address: "fd00:2::4", priority: 2}]}
`

const fullnat = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}, {address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat,
     scheduler: rr, source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3", port: 5353}]}
`

const cookies = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, syn-cookies: true,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: hash, listen: [{address: 192.0.2.10, ports: [81]}], protocol: tcp, mode: dnat, scheduler: maglev, syn-cookies: true, limits: {strict-tcp: true},
     backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: 10.0.2.5, port: 8080}]}
  - {name: turn, listen: [{address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: dnat, scheduler: rr, syn-cookies: true,
     backends: [{name: a, address: "fd00:2::4", port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
tables: {flows: 4096, flows6: 4096, half-open: 600}
`

const bypass = `
services:
  - {name: video, listen: [{address: 192.0.2.30, ports: [80]}], protocol: tcp, mode: dsr, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: tube, listen: [{address: 192.0.2.40, ports: [80]}], protocol: udp, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3"}]}
  - {name: tube6, listen: [{address: "2001:db8::40", ports: [80]}], protocol: tcp, mode: tunnel, scheduler: source-hash, tunnel: {type: gue},
     backends: [{name: a, address: "fd00:2::2"}, {name: b, address: "fd00:2::3"}]}
  - {name: syslog, listen: [{address: 192.0.2.50, ports: [514]}], protocol: udp, mode: stateless,
     backends: [{name: a, address: 10.0.2.4, port: 5514}, {name: b, address: 10.0.2.5, port: 5514}]}
  - {name: video6, listen: [{address: "2001:db8::30", ports: [80]}], protocol: tcp, mode: dsr, scheduler: symmetric-hash, limits: {strict-tcp: true},
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5", mac: "02:00:00:00:02:77"}]}
  - {name: gue, listen: [{address: 192.0.2.60, ports: [80, 8000-8009]}], protocol: tcp, mode: tunnel, scheduler: source-hash, tunnel: {type: gue},
     mss-clamp: true, limits: {strict-tcp: true}, backends: [{name: a, address: 10.0.2.8}, {name: b, address: "fd00:2::8"}]}
  - {name: gue64, listen: [{address: "2001:db8::60"}], protocol: udp, mode: tunnel, scheduler: symmetric-hash, tunnel: {type: gue},
     backends: [{name: a, address: 10.0.2.8}, {name: b, address: "fd00:2::8"}]}
  - {name: syslog6, listen: [{address: "2001:db8::50", ports: [514-515]}], protocol: udp, mode: stateless, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}]}
  - {name: mirror, listen: [{address: 192.0.2.51}], protocol: any, mode: stateless, scheduler: symmetric-hash, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
  - {name: pipe, listen: [{address: 192.0.2.61}, {address: "2001:db8::61"}], protocol: any, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::9"}]}
  - {name: all, listen: [{address: 192.0.2.62}], protocol: any, mode: dnat, scheduler: rr, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.9}, {name: b, address: 10.0.2.2}]}
  - {name: all6, listen: [{address: "2001:db8::62"}], protocol: any, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::9"}, {name: b, address: "fd00:2::2"}]}
  - {name: sctp, listen: [{address: 192.0.2.63, ports: [80]}], protocol: sctp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.3, port: 80}, {name: b, address: 10.0.2.4}]}
  - {name: sctp6, listen: [{address: "2001:db8::63", ports: [80]}], protocol: sctp, mode: stateless,
     backends: [{name: a, address: "fd00:2::3", port: 80}, {name: b, address: "fd00:2::4"}]}
`

const quotas = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/29], out: wan0, to: [203.0.113.201, 203.0.113.202], connections-per-client: 8}
  - {name: blocks, type: snat, source: [10.0.2.8/29], out: wan0, to: [203.0.113.203], ports: 2000-2999, port-block: 20}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], ports: 2000-2999, port-block: 20, deterministic: true, mss-clamp: true}
`

const turn = `
services:
  - {name: kept, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     sessions: [{client: 203.0.113.7, backend: b}],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: 10.0.2.5}]}
  - {name: direct, listen: [{address: 192.0.2.40, ports: [80]}], protocol: tcp, mode: dsr, scheduler: rr,
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
  - {name: tunnel, listen: [{address: 192.0.2.50, ports: [80]}], protocol: tcp, mode: tunnel, scheduler: wrr,
     backends: [{name: a, address: 10.0.2.8}, {name: b, address: 10.0.2.9}]}
  - {name: kept6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: random, persistence: {key: [source-address], timeout: 10m},
     sessions: [{client: "2001:db8:5::8/125", backend: b}],
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: mixed6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: wrr,
     persistence: {key: [source-address, destination-port], timeout: 10m}, source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: 10.0.2.4}]}
  - {name: direct6, listen: [{address: "2001:db8::40", ports: [80]}], protocol: tcp, mode: dsr, scheduler: wrr, persistence: {key: [source-mac, source-address], timeout: 10m},
     backends: [{name: a, address: "fd00:2::6", weight: 2}, {name: b, address: "fd00:2::7"}]}
  - {name: tunnel6, listen: [{address: "2001:db8::41", ports: [80]}], protocol: udp, mode: tunnel, scheduler: random, tunnel: {type: gue},
     backends: [{name: a, address: "fd00:2::8"}, {name: b, address: 10.0.2.9}, {name: c, address: 10.0.2.8, drain: true}]}
  - {name: all6, listen: [{address: "2001:db8::42"}], protocol: any, mode: dsr, scheduler: rr, persistence: {key: [source-address, source-port]},
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}, {name: c, address: "fd00:2::8", priority: 2}]}
`

const clientAddress = `
services:
  - {name: proxy, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, client-address: proxy-v2,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: toa, listen: [{address: 192.0.2.10, ports: [81]}, {address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: fullnat, client-address: toa,
     mss-clamp: true, scheduler: maglev, source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
`

const snat = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201, 203.0.113.202], filtering: %[1]s}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], filtering: %[1]s}
`

const remoteEndpoint = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201], mapping: address-and-port-dependent,
     filtering: address-and-port-dependent}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], mapping: address-and-port-dependent,
     filtering: address-and-port-dependent}
`

const forward = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
  - {name: dns, type: port-forward, listen: {address: 203.0.113.201, ports: [53]}, protocol: udp, to: {address: 10.0.2.3}}
`

const everyone = `
nat:
  - {name: quiet, type: snat, source: [10.0.2.2/31], to: [203.0.113.202], hairpin: off}
  - {name: wan, type: snat, in: wan0, out: wan0, to: [203.0.113.203]}
  - {name: all, type: snat, out: wan0, to: [203.0.113.201]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
`

const prefixes = `
nat:
  - {name: dmz, type: static, external: 198.51.100.128/25, internal: 10.1.9.128/25}
  - {name: dmz6, type: static, external: "2001:db8:77::/64", internal: "fd00:a:77::/64"}
  - {name: renumber, type: npt66, external: "2001:db8:1::/48", internal: "fd00:a:1::/48"}
`

const nat64 = `
nat:
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.201, 203.0.113.202]}
`

const siit = `
nat:
  - {name: bih, type: siit, prefix: "64:ff9b::/96", eam: [{ipv4: 203.0.113.16/28, ipv6: "fd00:2::/124"}]}
`

const denied = `
firewall:
  sets:
    bad: [203.0.113.2, 203.0.113.4, 203.0.113.5, 203.0.113.8/30, "2001:db8:5::4", "2001:db8:5::5/128", "2001:db8:5::8/125", "fd00:2::3"]
    late: [203.0.113.0/29, "2001:db8:5::/126", 10.0.2.5]
  rules:
    - {name: mail, action: drop, hook: ingress, protocol: tcp, ports: [25]}
    - {name: bad, action: drop, hook: ingress, source: "@bad"}
    - {name: inside, action: drop, hook: ingress, source: 10.0.2.8}
    - {name: friend, action: accept, hook: ingress, source: 203.0.113.1}
    - {name: late, action: drop, hook: ingress, source: "@late"}
    - {name: flood, action: drop, hook: ingress, source: "2001:db8:5::/64", protocol: udp, rate: 1/day, burst: 400}
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: rr, deny: [late],
     source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: stateless, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.4, port: 5353}, {name: b, address: 10.0.2.5, port: 5353}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat,
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}
`

const lists = `
firewall:
  sets:
    bad: [203.0.113.8/29, 203.0.113.3, "2001:db8:5::8/125", 10.0.2.8]
    good: [203.0.113.0/27, "2001:db8:5::/124"]
    few: [203.0.113.4, 203.0.113.5, "2001:db8:5::4"]
    served: [192.0.2.10, "2001:db8::/64"]
  rules:
    - {name: friend, action: accept, hook: ingress, source: 203.0.113.9, destination: 192.0.2.10}
    - {name: bad, action: drop, hook: ingress, source: "@bad"}
    - {name: flood, action: drop, hook: ingress, protocol: udp, destination: 192.0.2.10, ports: [53], rate: 1/day, burst: 400}
    - {name: flood6, action: drop, hook: ingress, protocol: tcp, source: "2001:db8:5::/64", in: wan0, rate: 1/day, burst: 400}
    - {name: closed, action: drop, hook: ingress, protocol: tcp, destination: "@served", ports: [22, 81-89]}
    - {name: pings, action: drop, hook: ingress, protocol: icmp, source: 203.0.113.16/28}
    - {name: mail, action: drop, hook: ingress, in: lan0, protocol: tcp, ports: [25]}
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: rr, allow: [good], deny: [few],
     source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, deny: [few],
     backends: [{name: a, address: 10.0.2.4, port: 5353}, {name: b, address: 10.0.2.5, port: 5353}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: stateless, allow: [good, few],
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
  - {name: http, listen: [{address: 192.0.2.10, ports: [8080]}], protocol: tcp, mode: dnat, scheduler: maglev, allow: [good],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}
`

const limits = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 40, new-connections-per-client: 2/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 40},
     backends: [{name: a, address: 10.0.2.4, port: 5353}, {name: b, address: 10.0.2.5, port: 5353}, {name: c, address: 10.0.2.6, max-connections: 5}]}
  - {name: hash, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, limits: {connections: 40, connections-per-client: 3, new-connections: 6/minute, reset-rate: 2/minute, strict-tcp: true},
     backends: [{name: a, address: 10.0.2.7, port: 8080}, {name: b, address: 10.0.2.8, port: 8080}]}
  - {name: udp, listen: [{address: 192.0.2.11, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, limits: {connections-per-client: 3, connections-per-backend: 30, new-connections-per-client: 2/minute},
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: plain, listen: [{address: 192.0.2.12}], protocol: any, mode: stateless, limits: {new-connections-per-client: 2/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.9}]}
  - {name: direct, listen: [{address: 192.0.2.13, ports: [53]}], protocol: udp, mode: dsr, scheduler: rr, limits: {connections: 50, connections-per-client: 3},
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: tunnel, listen: [{address: 192.0.2.13, ports: [80]}], protocol: tcp, mode: tunnel, scheduler: maglev, limits: {new-connections: 6/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: wlc, limits: {connections-per-client: 3, reset-rate: 2/minute},
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: maglev, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 20},
     source-pool: [10.0.2.101, "fd00:2::101"], backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::3", max-connections: 30}]}
  - {name: hash6, listen: [{address: "2001:db8::11", ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, limits: {new-connections-per-client: 2/minute},
     backends: [{name: a, address: "fd00:2::4", port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
  - {name: deep6, listen: [{address: "2001:db8::14"}], protocol: tcp, mode: dsr, scheduler: maglev, limits: {connections: 40, connections-per-backend: 30},
     backends: [{name: a, address: "fd00:2::8"}, {name: b, address: "fd00:2::9"}]}
  - {name: direct6, listen: [{address: "2001:db8::13"}], protocol: udp, mode: tunnel, scheduler: wrr, limits: {connections-per-client: 3, connections-per-backend: 20},
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}]}
`

const families = `
lowest-ipv6-mtu: 1400
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: source-hash, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080, weight: 3}]}
  - {name: other, listen: [{address: 192.0.2.10, ports: [81]}, {address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: fullnat, scheduler: wrr, mss-clamp: true,
     source-pool: [10.0.2.100, "fd00:2::100"], limits: {strict-tcp: true}, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.2, port: 8081}, {name: b, address: "fd00:2::3", port: 8081, weight: 3}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}, {address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: symmetric-hash,
     source-pool: [10.0.2.101, "fd00:2::101"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::5", port: 5353}]}
  - {name: least, listen: [{address: 192.0.2.10, ports: [54]}, {address: "2001:db8::10", ports: [54]}], protocol: udp, mode: fullnat, scheduler: wlc,
     source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::5", weight: 2}]}
  - {name: range, listen: [{address: 192.0.2.10, ports: [8000-8009]}, {address: "2001:db8::10", ports: [8000-8009]}], protocol: tcp, mode: fullnat, scheduler: random,
     source-pool: [10.0.2.103, "fd00:2::103"],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: "fd00:2::7"}]}
  - {name: wide, listen: [{address: 192.0.2.11}, {address: "2001:db8::11"}], protocol: udp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.104, "fd00:2::104"],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: "fd00:2::7"}]}
`

const states = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: wrr, when-down: reject,
     backends: [{name: a, address: 10.0.2.4}]}
  - {name: hash, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, when-down: reject,
     sessions: [{client: 203.0.113.8/29, backend: b}],
     backends: [{name: a, address: 10.0.2.5, port: 8080}, {name: b, address: 10.0.2.6, port: 8080}]}
  - {name: plain, listen: [{address: 192.0.2.12, ports: [53]}], protocol: udp, mode: stateless, when-down: drop,
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: direct, listen: [{address: 192.0.2.13, ports: [80]}], protocol: tcp, mode: dsr, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3, priority: 2}]}
  - {name: any, listen: [{address: 192.0.2.14}], protocol: any, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.9}]}
  - {name: six, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, when-down: reset,
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080, priority: 2}]}
  - {name: mixed, listen: [{address: "2001:db8::11", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev, persistence: {key: [source-address], timeout: 10m},
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::4", port: 8080}]}
  - {name: mixed6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: rr, when-down: reject,
     source-pool: [10.0.2.101, "fd00:2::101"], backends: [{name: a, address: 10.0.2.4}]}
  - {name: tunnel, listen: [{address: "2001:db8::12"}], protocol: tcp, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::5"}, {name: b, address: "fd00:2::6"}]}
`

const overlap = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: 203.0.113.201, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 203.0.113.201, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: 10.0.2.5}]}
  - {name: mapped, listen: [{address: 203.0.113.202, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.6, port: 8080}, {name: b, address: "fd00:2::6", port: 8080}]}
  - {name: six, listen: [{address: "2001:db8:77::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: six-dns, listen: [{address: "2001:db8:ab::1", ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
nat:
  - {name: one, type: static, external: 203.0.113.202/32, internal: 10.0.2.6/32}
  - {name: dmz6, type: static, external: "2001:db8:77::/64", internal: "fd00:2::/64", in: wan0}
  - {name: office, type: snat, source: [10.0.2.0/26], to: [203.0.113.201, 203.0.113.203]}
  - {name: office6, type: snat, source: ["fd00:2::8/125"], out: wan0, to: ["2001:db8:ab::1"]}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.203]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.203, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
`

// differentInterfaces has endpoints with a different service on each ingress interface.
const differentInterfaces = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80], interface: wan0}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: inner, listen: [{address: 192.0.2.10, ports: [80], interface: lan0}], protocol: tcp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: 10.0.2.5, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53], interface: wan0}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.6, port: 5353}]}
  - {name: rest, listen: [{address: 192.0.2.10, interface: lan0}, {address: 192.0.2.11}], protocol: udp, mode: dnat, scheduler: source-hash,
     backends: [{name: a, address: 10.0.2.7}]}
  - {name: direct, listen: [{address: 192.0.2.11, ports: [80], interface: wan0}], protocol: tcp, mode: dsr, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.8}]}
  - {name: six, listen: [{address: "2001:db8::10", ports: [80], interface: wan0}, {address: "2001:db8::10", ports: [81], interface: lan0}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::2", port: 8080}]}
nat:
  - {name: http, type: port-forward, listen: {address: 203.0.113.203, ports: [80], interface: wan0}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
  - {name: http-in, type: port-forward, listen: {address: 203.0.113.203, ports: [80], interface: lan0}, protocol: tcp, to: {address: 10.0.2.9, port: 8081}}
  - {name: office, type: snat, source: [10.0.2.0/24], in: lan0, out: wan0, to: [203.0.113.203, 203.0.113.204]}
  - {name: never, type: snat, source: ["fd00:2::/64"], in: wan0, out: wan0, to: ["2001:db8:ab::1"]}
`

// mapped has rules with mapping requests.
const mapped = `
nat:
  - {name: office, type: snat, source: [10.0.2.2/31, 10.0.2.4/31], out: wan0, to: [203.0.113.201, 203.0.113.202], ports: 2000-2063, ports-per-client: 6, filtering: address-dependent, pcp: true}
  - {name: strict, type: snat, source: [10.0.2.6/31, 10.0.2.8/31], in: lan0, to: [203.0.113.203], filtering: address-and-port-dependent, pcp: true}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], in: lan0, pool: [203.0.113.203], pcp: true}
`
