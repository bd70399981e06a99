// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// targets has the known targets of iptables. Others are user chains or have no equivalent.
var targets = map[string]verdict{
	"ACCEPT": doAccept, "DROP": doDrop, "RETURN": doReturn, "REJECT": doReject, "DNAT": doDNAT, "SNAT": doSNAT, "MASQUERADE": doMasq,
	"NETMAP": doNetmap, "REDIRECT": doRedirect, "LOG": doLog, "MARK": doMark, "NOTRACK": doNotrack, "TCPMSS": doOther, "CT": doOther,
	"AUDIT": doOther, "CHECKSUM": doOther, "CLASSIFY": doOther, "CLUSTERIP": doOther, "CONNMARK": doOther, "CONNSECMARK": doOther,
	"DSCP": doOther, "DNPT": doOther, "ECN": doOther, "HL": doOther, "HMARK": doOther, "IDLETIMER": doOther, "LED": doOther, "NFLOG": doOther,
	"NFQUEUE": doOther, "RATEEST": doOther, "SECMARK": doOther, "SET": doOther, "SNPT": doOther, "SYNPROXY": doOther, "TCPOPTSTRIP": doOther,
	"TEE": doOther, "TOS": doOther, "TPROXY": doOther, "TRACE": doOther, "TTL": doOther, "ULOG": doOther, "QUEUE": doOther,
}

// target reads the target, or one of its options.
func (o *options) target(word string) bool {
	r := o.r
	switch word {
	case "-j", "--jump":
		to := o.next()
		var known bool
		if r.do, known = targets[to]; !known {
			r.do, r.to = doJump, to
		} else if r.do == doOther {
			r.to = to
		} else if r.do == doReject {
			r.unreachable = true
		}
		o.module = ""
	case "-g", "--goto":
		r.do, r.to = doGoto, o.next()
	case "--to-destination", "--to-source":
		o.endpoint(word, o.next())
	case "--to":
		text := o.next()
		if p, err := prefixOf(text); r.do == doNetmap && err == nil {
			r.addresses = []netip.Prefix{p}
		} else {
			o.endpoint(word, text)
		}
	case "--to-ports":
		text := o.next()
		if list, err := portsOf(text); err == nil && len(list) == 1 {
			r.ports = list[0]
		} else {
			o.addLoss(word+" "+text, "", "")
		}
	case "--random", "--random-fully":
		r.random = true
	case "--persistent", "--log-tcp-options", "--log-ip-options", "--log-uid", "--log-tcp-sequence", "--log-macdecode":
		if word != "--persistent" {
			o.addLoss(word, "the log lines of Sluice have less detail", "")
		}
	case "--reject-with":
		how := o.next()
		r.reset = how == "tcp-reset"
		r.unreachable = how == "icmp-port-unreachable" || how == "icmp6-port-unreachable" || how == "port-unreach"
	case "--log-prefix":
		r.log.prefix = o.next()
	case "--log-level":
		r.log.level = levelName(o.next())
	case "--set-mark", "--set-xmark", "--or-mark", "--and-mark", "--xor-mark":
		o.setMark(word)
	case "--clamp-mss-to-pmtu":
		r.do = doClamp
	case "--notrack":
		r.do = doNotrack
	case "--helper":
		if r.do == doOther && r.to == "CT" {
			r.do, r.helper = doHelper, o.next()
			return true
		}
		return false
	default:
		return false
	}
	return true
}

func (o *options) addLoss(text, effect, next string) {
	o.r.lost = append(o.r.lost, missingPart{text, next, effect})
}

func levelName(s string) string {
	if n, err := strconv.Atoi(s); err == nil && n >= 0 && n < 8 {
		return []string{"emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"}[n]
	}
	switch s {
	case "error":
		return "err"
	case "warn":
		return "warning"
	case "panic":
		return "emerg"
	}
	return s
}

func (o *options) setMark(word string) {
	k, ok := markOf(o.next())
	r := o.r
	switch {
	case !ok:
		r.do, r.to = doOther, "MARK"
	case word == "--set-mark" || word == "--set-xmark":
		r.mark, r.mask = k.value, k.mask
	case word == "--or-mark":
		r.mark, r.mask = k.value, k.value
	default:
		r.do, r.to = doOther, "MARK "+word
	}
}

// endpoint reads "10.0.0.2:80", "10.0.0.2-10.0.0.5", ":8080", "[2001:db8::1]:80".
func (o *options) endpoint(word, text string) {
	r := o.r
	address, port := text, ""
	if rest, ok := strings.CutPrefix(text, "["); ok {
		inner, after, closed := strings.Cut(rest, "]")
		if !closed {
			r.do, r.to = doOther, word+" "+text
			return
		}
		address, port = inner, strings.TrimPrefix(after, ":")
		address = strings.ReplaceAll(address, "]-[", "-")
	} else if strings.Count(text, ":") == 1 {
		address, port, _ = strings.Cut(text, ":")
	}
	var err1, err2 error
	if address != "" {
		lo, hi, ranged := strings.Cut(address, "-")
		if !ranged {
			hi = lo
		}
		r.first, err1 = netip.ParseAddr(lo)
		r.last, err2 = netip.ParseAddr(hi)
	}
	if err1 != nil || err2 != nil || r.first.BitLen() != r.last.BitLen() || r.last.Less(r.first) {
		r.do, r.to = doOther, word+" "+text
		return
	}
	if port != "" {
		port, base, shifted := strings.Cut(port, "/")
		list, err := portsOf(port)
		if shifted && err == nil {
			r.shift, err = portOf(base, 0)
		}
		if err != nil || len(list) != 1 {
			r.do, r.to = doOther, word+" "+text
			return
		}
		r.ports = list[0]
	}
	if r.ports == (flow.Ports{}) && address == "" {
		r.do, r.to = doOther, word+" "+text
	}
}
