"""What a study found, told to people: summary, report, notes, dashboard, launch files.

    report(settings, study)      # exit code
    export(settings, study)      # path of the launch file
"""
