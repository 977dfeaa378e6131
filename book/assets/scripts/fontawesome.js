// Stands in for the theme's script of the same name: 1.5 MB that redraw each icon as a picture.
// Without it the theme's style sheet draws them, from its web font. (Sphinx copies the files of
// `html_static_path` last, over those of the theme.)
