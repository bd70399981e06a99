// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
)

// recordFile lists the addresses that Sluice has added to interfaces. If this process is killed, the next one, or
// "sluice stop --force", removes them. The file is written before an address is added and after one is removed.
const recordFile = "addresses.json"

type recorded struct {
	Ifindex   int        `json:"ifindex"`
	Interface string     `json:"interface"`
	Address   netip.Addr `json:"address"`
}

// readRecord returns the addresses added by a process in this network namespace, with the names of the interfaces.
func readRecord(dir string) (map[key]string, error) {
	text, err := os.ReadFile(filepath.Join(dir, recordFile))
	if errors.Is(err, os.ErrNotExist) {
		return map[key]string{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("held addresses: %w", err)
	}
	var list []recorded
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("held addresses: %s: %w", filepath.Join(dir, recordFile), err)
	}
	record := map[key]string{}
	for _, r := range list {
		record[key{r.Ifindex, r.Address}] = r.Interface
	}
	return record, nil
}

// writeRecord replaces the file, or removes it if the record is empty.
func writeRecord(dir string, record map[key]string) error {
	path := filepath.Join(dir, recordFile)
	if len(record) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("held addresses: %w", err)
		}
		return nil
	}
	var list []recorded
	for k, name := range record {
		list = append(list, recorded{k.ifindex, name, k.at})
	}
	slices.SortFunc(list, func(a, b recorded) int {
		return cmp.Or(cmp.Compare(a.Ifindex, b.Ifindex), a.Address.Compare(b.Address))
	})
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("held addresses: %w", err)
	}
	return os.Rename(path+".new", path)
}

// Left reports whether an earlier process has left addresses on interfaces.
func Left(dir string) (bool, error) {
	record, err := readRecord(dir)
	return len(record) > 0, err
}

// Remove removes the addresses that an earlier process left.
func Remove(dir string) error {
	record, err := readRecord(dir)
	if err != nil {
		return err
	}
	return giveBack(dir, record, func(key) bool { return true })
}

// giveBack removes the chosen addresses from their interfaces, except addresses that another program has added in the
// meantime.
func giveBack(dir string, record map[key]string, chosen func(key) bool) error {
	var errs []error
	there, err := readAddresses()
	if err != nil {
		return err
	}
	changed := false
	for k := range record {
		if !chosen(k) {
			continue
		}
		if slices.ContainsFunc(there, func(a address) bool { return a.index == k.ifindex && a.at == k.at && a.ours() }) {
			if err := remove(k); err != nil {
				errs = append(errs, fmt.Errorf("address %s of interface %s: %w", k.at, record[k], err))
				continue
			}
		}
		delete(record, k)
		changed = true
	}
	if changed {
		errs = append(errs, writeRecord(dir, record))
	}
	return errors.Join(errs...)
}
