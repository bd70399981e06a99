// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// saved is the stored form of the objects.
type saved struct {
	Layout    int            `json:"layout"`
	Addresses []savedAddress `json:"addresses"`
	Policies  []*policy      `json:"policies"`
	Farms     []savedFarm    `json:"farms"`
}

type savedAddress struct {
	Address  *address `json:"address"`
	Policies []string `json:"policies"`
}

type savedFarm struct {
	Farm      *farm    `json:"farm"`
	Addresses []string `json:"addresses"`
	Policies  []string `json:"policies"`
}

const layout = 1

func (a *API) write() error {
	if a.opt.Path == "" {
		return nil
	}
	raw, err := json.Marshal(a.store.save())
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(a.opt.Path); err == nil && string(old) == string(raw) {
		return nil
	}
	if err := replace(a.opt.Path, raw); err != nil {
		return fmt.Errorf("the objects of the nftlb API cannot be kept: %w", err)
	}
	return nil
}

// replace writes a file such that a crash leaves the old or the new content.
func replace(path string, raw []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "new-nftlb-*")
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

func (s *store) save() saved {
	d := saved{Layout: layout, Policies: s.policies}
	for _, a := range s.addresses {
		one := savedAddress{Address: a}
		for _, p := range a.policies {
			one.Policies = append(one.Policies, p.policy.Name)
		}
		d.Addresses = append(d.Addresses, one)
	}
	for _, f := range s.farms {
		one := savedFarm{Farm: f}
		for _, fa := range f.addresses {
			one.Addresses = append(one.Addresses, fa.address.Name)
		}
		for _, p := range f.policies {
			one.Policies = append(one.Policies, p.policy.Name)
		}
		for _, session := range f.Sessions {
			if session.Backend = ""; session.backend != nil {
				session.Backend = session.backend.Name
			}
		}
		d.Farms = append(d.Farms, one)
	}
	return d
}

func (a *API) read() error {
	if a.opt.Path == "" {
		return nil
	}
	raw, err := os.ReadFile(a.opt.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var d saved
	if err == nil {
		err = json.Unmarshal(raw, &d)
	}
	if err == nil && d.Layout != layout {
		err = fmt.Errorf("layout %d, this version reads %d", d.Layout, layout)
	}
	if err != nil {
		return fmt.Errorf("objects of the nftlb API: %s: %w; move the file away to start without them", a.opt.Path, err)
	}
	a.store.restore(d)
	return nil
}

// restore restores the stored objects, with all rules pending.
func (s *store) restore(d saved) {
	s.policies = d.Policies
	for _, one := range d.Addresses {
		a := one.Address
		for _, name := range one.Policies {
			if p := s.policyNamed(name); p != nil {
				a.policies = append(a.policies, &addressPolicy{policy: p, action: none})
			}
		}
		s.addresses = append(s.addresses, a)
	}
	for _, one := range d.Farms {
		f := one.Farm
		f.action, f.policiesAction = none, none
		for _, name := range one.Addresses {
			if a := s.addressNamed(name); a != nil {
				f.addresses = append(f.addresses, &farmAddress{farm: f, address: a, action: none})
			}
		}
		for _, name := range one.Policies {
			if p := s.policyNamed(name); p != nil {
				f.policies = append(f.policies, &farmPolicy{farm: f, policy: p, action: none})
			}
		}
		for _, b := range f.Backends {
			b.farm, b.action = f, none
		}
		for _, session := range f.Sessions {
			session.backend = f.backend(session.Backend)
		}
		s.farms = append(s.farms, f)
	}
	for _, p := range s.policies {
		p.action = none
	}
	for _, a := range s.addresses {
		a.action = none
	}
}
