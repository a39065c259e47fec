package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func testImage(t *testing.T) (imageSpec, string) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir+"/app", "#!/bin/sh\n")
	write(t, dir+"/share/b", "b")
	write(t, dir+"/share/a", "a")
	if err := os.Symlink("a", dir+"/share/link"); err != nil {
		t.Fatal(err)
	}
	return imageSpec{
		Tag: "localhost/app:dev", Entrypoint: []string{"/usr/bin/app"}, Env: []string{"A=b=c"}, User: "1000",
		Labels: []string{"k=v"}, Dirs: []string{"/tmp:1777"}, Links: []string{"/bin/app:/usr/bin/app"},
		Add: []string{dir + "/app:/usr/bin/app:0755", dir + "/share:/share"},
	}, dir
}

func TestImageIsReproducible(t *testing.T) {
	spec, dir := testImage(t)
	if _, err := buildImage(spec, dir+"/one.tar"); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(time.Hour)
	for _, file := range []string{"/app", "/share/a", "/share"} {
		if err := os.Chtimes(dir+file, later, later); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := buildImage(spec, dir+"/two.tar"); err != nil {
		t.Fatal(err)
	}
	one, err := os.ReadFile(dir + "/one.tar")
	if err != nil {
		t.Fatal(err)
	}
	two, err := os.ReadFile(dir + "/two.tar")
	if err != nil || !bytes.Equal(one, two) {
		t.Errorf("the archives differ (%v)", err)
	}
}

func TestImageContainsTheRequestedFiles(t *testing.T) {
	spec, dir := testImage(t)
	size, err := buildImage(spec, dir+"/app.tar")
	if err != nil {
		t.Fatal(err)
	}
	if tag, err := imageTag(dir + "/app.tar"); tag != spec.Tag || err != nil {
		t.Errorf("tag %q, %v", tag, err)
	}
	image, err := tarball.ImageFromPath(dir+"/app.tar", nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config; !slices.Equal(got.Entrypoint, spec.Entrypoint) || got.User != "1000" ||
		got.Labels["k"] != "v" || !slices.Contains(got.Env, "A=b=c") || config.OS != "linux" {
		t.Errorf("configuration %+v", config)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(content)
	if err != nil || int64(len(raw)) != size {
		t.Errorf("%d bytes, reported %d, %v", len(raw), size, err)
	}
	var got []string
	for archive := tar.NewReader(bytes.NewReader(raw)); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if header.Uid != 0 || header.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d, time %s", header.Name, header.Uid, header.ModTime)
		}
		got = append(got, strings.Join([]string{header.FileInfo().Mode().String(), header.Name, header.Linkname}, " "))
	}
	want := []string{
		"drwxr-xr-x bin/ ", "Lrwxrwxrwx bin/app /usr/bin/app",
		"drwxr-xr-x share/ ", "-rwxr-xr-x share/a ", "-rwxr-xr-x share/b ", "Lrwxrwxrwx share/link a",
		"dtrwxrwxrwx tmp/ ", "drwxr-xr-x usr/ ", "drwxr-xr-x usr/bin/ ", "-rwxr-xr-x usr/bin/app ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestUnchangedImageIsNotRewritten(t *testing.T) {
	spec, dir := testImage(t)
	output := dir + "/app.tar"
	if _, err := buildImage(spec, output); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(output)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := buildImage(spec, output); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(output); err != nil || !os.SameFile(before, after) {
		t.Errorf("the archive was rewritten (%v)", err)
	}
}

func TestImageErrorsNameTheFlag(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/app", "x")
	for _, c := range []struct {
		spec imageSpec
		want string
	}{
		{imageSpec{Tag: "localhost/App:dev"}, "--tag"},
		{imageSpec{Tag: "localhost/app"}, "--tag"},
		{imageSpec{Tag: "localhost/app:dev", Env: []string{"A"}}, "--env"},
		{imageSpec{Tag: "localhost/app:dev", Labels: []string{"=v"}}, "--label"},
		{imageSpec{Tag: "localhost/app:dev", Add: []string{dir + "/app"}}, "--add"},
		{imageSpec{Tag: "localhost/app:dev", Add: []string{dir + "/app:usr/bin/app"}}, "begin with /"},
		{imageSpec{Tag: "localhost/app:dev", Add: []string{dir + "/app:/app:9"}}, "octal"},
		{imageSpec{Tag: "localhost/app:dev", Add: []string{dir + "/none:/app"}}, "--add"},
		{imageSpec{Tag: "localhost/app:dev", Add: []string{"/dev:/dev"}}, "neither a file"},
		{imageSpec{Tag: "localhost/app:dev", Base: dir + "/none"}, "--base"},
		{imageSpec{Tag: "localhost/app:dev", Dirs: []string{"tmp"}}, "--dir"},
		{imageSpec{Tag: "localhost/app:dev", Links: []string{"/a"}}, "--link"},
	} {
		output := filepath.Join(dir, "out.tar")
		if _, err := buildImage(c.spec, output); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.spec, err, c.want)
		}
		if _, err := os.Stat(output); err == nil {
			t.Fatalf("%+v: an archive was written", c.spec)
		}
	}
}

func TestImageTagRejectsOtherFiles(t *testing.T) {
	path := t.TempDir() + "/x"
	for _, content := range []string{"", "text", strings.Repeat("\x00", 4096)} {
		write(t, path, content)
		if tag, err := imageTag(path); err == nil {
			t.Errorf("%q: tag %q", content, tag)
		}
	}
}

func TestLibrariesOfAProgram(t *testing.T) {
	libraries, err := sharedLibraries("/bin/sh")
	if err != nil || !slices.ContainsFunc(libraries, func(l string) bool { return strings.Contains(l, "libc.so") }) ||
		!slices.ContainsFunc(libraries, func(l string) bool { return strings.Contains(l, "ld-linux") }) {
		t.Errorf("of /bin/sh: %v, %v", libraries, err)
	}
	text := t.TempDir() + "/text"
	write(t, text, "#!/bin/sh\n")
	if libraries, err := sharedLibraries(text); len(libraries) != 0 || err != nil {
		t.Errorf("of a script: %v, %v", libraries, err)
	}
}

func TestParseLdd(t *testing.T) {
	got, err := parseLdd("\tlinux-vdso.so.1 (0x1)\n\tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x2)\n\t/lib64/ld-linux-x86-64.so.2 (0x3)\n")
	if want := []string{"/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"}; !slices.Equal(got, want) || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := parseLdd("\tlibx.so => not found\n"); err == nil {
		t.Errorf("a missing library is ignored: %v", got)
	}
}
